"""What a forward ran under, for running it again in backward: autocast, random numbers, hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Result = TypeVar("Result")


class AutocastState:
    """Autocast as it is when this is made, for the CPU and one device.

    Args:
        device_type: the device besides the CPU; may be the CPU.
    """

    def __init__(self, device_type: str) -> None:
        self._states = {
            each: (torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
            for each in {"cpu", device_type}
        }
        self.is_on = any(is_enabled for is_enabled, _ in self._states.values())
        """Whether it is on for any of them."""
        self._is_cached = torch.is_autocast_cache_enabled()

    def around(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """Return *function* run under this state."""
        if not self.is_on and not torch._C._is_any_autocast_enabled():
            return function
        for device_type, (is_enabled, dtype) in self._states.items():
            context = torch.autocast(
                device_type, dtype=dtype, enabled=is_enabled, cache_enabled=self._is_cached
            )
            function = context(function)
        return function


class RandomStates:
    """The random numbers' state before each of several calls, kept only if any were drawn.

    Args:
        tensor: what the calls are of; its device has the generator.
    """

    def __init__(self, tensor: Tensor) -> None:
        # Fake tensors draw nothing.
        self._device = None if isinstance(tensor, FakeTensor) else tensor.device
        self._states: list[tuple[Tensor, Tensor | None]] = []

    def note(self) -> None:
        """Take down the state; before each call, and after the last one."""
        if self._device is not None:
            self._states.append(_state_of(self._device))

    def forget_if_unchanged(self) -> None:
        """Drop the states if nothing was drawn since the first."""
        if self._states and _are_equal(self._states[0], self._states[-1]):
            self._states = []

    @property
    def is_needed(self) -> bool:
        """Whether anything was drawn."""
        return bool(self._states)

    def set(self, index: int) -> None:
        """Make the state what it was before call *index*."""
        if self._states and self._device is not None:
            _set_state(self._device, self._states[index])

    def kept(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """Return *function*, after which the state is as before it, if it will be set inside."""
        device = self._device
        if not self._states or device is None:
            return function

        def run(*args: Any) -> Result:
            before = _state_of(device)
            try:
                return function(*args)
            finally:
                _set_state(device, before)

        return run


def _state_of(device: torch.device) -> tuple[Tensor, Tensor | None]:
    if device.type == "cpu":
        return torch.get_rng_state(), None
    return torch.get_rng_state(), _module_of(device).get_rng_state(device)


def _set_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        _module_of(device).set_rng_state(state[1], device)


def _module_of(device: torch.device) -> Any:
    return getattr(torch, device.type)


def _are_equal(left: tuple[Tensor, Tensor | None], right: tuple[Tensor, Tensor | None]) -> bool:
    if not torch.equal(left[0], right[0]):
        return False
    return left[1] is None or right[1] is None or torch.equal(left[1], right[1])


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
