"""Runs a function so that hooks on saved tensors, or on gradients, do not see what it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def without_hooks(function: Callable[..., None]) -> Callable[..., None]:
    """Return *function*, run so that hooks on saved tensors get none of what it saves."""

    def run(*args: Any) -> None:
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            function(*args)
            return
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
            function(*args)

    return run


def _same(tensor: Any) -> Any:
    return tensor


class NoTensorHooks:
    """While entered, hooks on the gradients of *tensors* do not run.

    They are to see each gradient once and whole, as autograd gets it from us.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tables = [table for t in tensors if (table := t._backward_hooks)]
        self._kept = [dict(table) for table in self._tables]

    def __enter__(self) -> None:
        for table in self._tables:
            table.clear()

    def __exit__(self, *_: object) -> None:
        for table, kept in zip(self._tables, self._kept, strict=True):
            table.update(kept)
