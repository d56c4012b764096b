"""Runs code so that hooks on gradients do not see what it does."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


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
