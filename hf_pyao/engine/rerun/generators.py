"""The states of random number generators: of torch, Python and numpy, shared ones and others.

[Note: Shared generators]
All threads draw from the same default generators. A second run sets their state, draws, and sets
the state back. If another thread draws in between, or between the note of a state and the draw in
forward, the second run draws other numbers than forward did. Therefore what draws runs only once
where other threads may draw (:func:`may_be_disturbed`), those of a second attached model, too.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def may_be_disturbed() -> bool:
    """Say whether other threads may draw from the default generators.

    They may if this is not the main thread, or if threads run that Python waits for at its end.
    Daemons are left out: those that watch (progress bars, writers of logs) are daemons.
    """
    main = threading.main_thread()
    if threading.active_count() == 1:
        return False
    if threading.current_thread() is not main and not _is_of_torch():
        return True
    return any(not each.daemon and each is not main for each in threading.enumerate())


def _is_of_torch() -> bool:
    """Say whether the calling thread is one on which torch runs backward."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def accelerators_in(devices: Iterable[torch.device]) -> tuple[torch.device, ...]:
    """Return those of *devices*, each once, that have a generator and kernels of their own."""
    return tuple(d for d in dict.fromkeys(devices) if d.type not in ("cpu", "meta"))


class RandomState:
    """Where the default generators of torch, Python and numpy are.

    Args:
        devices: those whose generators count, beside the CPU's; a CPU among them changes nothing.
        torch_only: leave out those of Python and numpy.
    """

    def __init__(self, devices: Iterable[torch.device], *, torch_only: bool = False) -> None:
        self._torch = torch.get_rng_state()
        self._devices = [
            (device, torch.get_device_module(device).get_rng_state(device))
            for device in accelerators_in(devices)
        ]
        self._torch_only = torch_only
        self._python = None if torch_only else random.getstate()
        numpy = None if torch_only else _numpy_random()
        self._numpy = None if numpy is None else numpy.get_state(legacy=False)

    def restore(self) -> None:
        """Put the generators back to where they were."""
        torch.set_rng_state(self._torch)
        for device, state in self._devices:
            torch.get_device_module(device).set_rng_state(state, device)
        if self._python is not None:
            random.setstate(self._python)
        numpy = _numpy_random()
        if numpy is not None and self._numpy is not None:
            numpy.set_state(self._numpy)

    def now(self) -> RandomState:
        """Return the states of the same generators at the moment."""
        return RandomState([device for device, _ in self._devices], torch_only=self._torch_only)

    def is_equal(self, other: RandomState) -> bool:
        """Say whether *other*, of the same generators, has the same states."""
        return (
            torch.equal(self._torch, other._torch)
            and all(torch.equal(a, b) for (_, a), (_, b) in zip(self._devices, other._devices))  # noqa: B905
            and self._python == other._python
            and pickle.dumps(self._numpy) == pickle.dumps(other._numpy)
        )

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Put the generators back at the end of this context."""
        try:
            yield
        finally:
            self.restore()


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

    def set(self, index: int) -> None:
        """Make the state what it was before call *index*."""
        if self._states:
            self._states[index].restore()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Put the state at the end back to that at the beginning, if states are set inside."""
        if not self._states:
            yield
            return
        with self._states[0].now().kept():
            yield


def _numpy_random() -> Any:
    """Return numpy's module of random numbers, if anyone has imported it."""
    return sys.modules.get("numpy.random")
