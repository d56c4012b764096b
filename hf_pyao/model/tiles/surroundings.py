"""What a function in tiles ran under, for running it again in backward: random numbers, hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hf_pyao.engine.rerun.generators import RandomState


class RandomStates:
    """The state of torch's random numbers before each of several calls, if any were drawn.

    Those of Python and numpy are left out: no function that draws from them runs in tiles.

    Args:
        tensor: what the calls are of; its device has the generator.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._devices = [tensor.device]
        self._has_values = not isinstance(tensor, FakeTensor)  # fake tensors draw nothing
        self._states: list[RandomState] = []

    def note(self) -> None:
        """Note the state; before each call, and after the last one."""
        if self._has_values:
            self._states.append(RandomState(self._devices, torch_only=True))

    def forget_if_unchanged(self) -> None:
        """Drop the states if nothing was drawn since the first."""
        if self._states and self._states[0].is_equal(self._states[-1]):
            self._states = []

    @property
    def is_needed(self) -> bool:
        """Whether anything was drawn."""
        return bool(self._states)

    def set(self, index: int) -> None:
        """Make the state what it was before call *index*."""
        if self._states:
            self._states[index].restore()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Have the state at the end be that at the beginning, if it is set inside."""
        if not self._states:
            yield
            return
        with self._states[0].now().kept():
            yield


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
