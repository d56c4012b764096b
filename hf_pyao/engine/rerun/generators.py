"""The states of random number generators: of torch, Python and numpy, shared ones and others.

[Note: Shared generators]
All threads draw from the same default generators. A second run sets their state, draws, and sets
the state back. If another thread draws in between, or between the note of a state and the draw in
forward, the second run draws other numbers than forward did. Therefore what draws runs only once
where other threads may draw (:func:`may_be_disturbed`), those of a second attached model, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

_NUM_WORDS = 625
"""Of numpy's default generator: 32 bits each, and which one comes next."""


def may_be_disturbed() -> bool:
    """Say whether other threads may draw from the default generators.

    They may if this is not the main thread, or if threads run that Python waits for at its end.
    Daemons are left out: those that watch (progress bars, writers of logs) are daemons.
    """
    main = threading.main_thread()
    if threading.active_count() == 1:
        return False
    here = threading.current_thread()
    if here is not main and not isinstance(here, threading._DummyThread):  # torch's, for backward
        return True
    return any(not each.daemon and each is not main for each in threading.enumerate())


def accelerators_in(devices: Iterable[torch.device]) -> tuple[torch.device, ...]:
    """Return those of *devices*, each once, that have a generator and kernels of their own."""
    return tuple(d for d in dict.fromkeys(devices) if d.type not in ("cpu", "meta"))


class RandomState:
    """Where the default generators of torch, Python and numpy are.

    Args:
        devices: those whose generators count, beside the CPU's; a CPU among them changes nothing.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = accelerators_in(devices)
        self._states = [get() for get, _ in _generators(self._devices)]

    def restore(self) -> None:
        """Put the generators back to where they were."""
        # Numpy may have been imported since: it comes last.
        for (_, put), state in zip(_generators(self._devices), self._states, strict=False):
            put(state)

    def now(self) -> RandomState:
        """Return the states of the same generators at the moment."""
        return RandomState(self._devices)

    def is_equal(self, other: RandomState) -> bool:
        """Say whether *other*, of the same generators, has the same states."""
        return list(map(_bytes_of, self._states)) == list(map(_bytes_of, other._states))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Put the generators back at the end of this context."""
        try:
            yield
        finally:
            self.restore()


def _generators(
    devices: Iterable[torch.device],
) -> Iterator[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Yield of each default generator what returns its state, and what sets it."""
    yield torch.get_rng_state, torch.set_rng_state
    yield random.getstate, random.setstate
    for device in devices:
        module = torch.get_device_module(device)
        yield (
            functools.partial(module.get_rng_state, device),
            functools.partial(module.set_rng_state, device=device),
        )
    if "numpy.random" in sys.modules:
        yield _numpy_state, _set_numpy_state


def _numpy_state() -> Any:
    """Return the state of numpy's default generator; it is read anew only where it has changed.

    Numpy takes as long for it as for a layer's kernels. Its words, and which comes next, tell of
    each draw but that of a second normal number, which is there from the first one.
    """
    numpy = sys.modules["numpy.random"]
    generator = numpy.get_bit_generator()
    if type(generator) is not numpy.MT19937:
        return numpy.get_state(legacy=False)
    words = ctypes.string_at(generator.ctypes.state_address, _NUM_WORDS * 4)
    state = _numpy_state_with(words)
    return numpy.get_state(legacy=False) if state["has_gauss"] else state


@functools.lru_cache(maxsize=1)
def _numpy_state_with(_: bytes) -> Any:
    return sys.modules["numpy.random"].get_state(legacy=False)


def _set_numpy_state(state: Any) -> None:
    if state is not _numpy_state():
        sys.modules["numpy.random"].set_state(state)


def _bytes_of(state: Any) -> bytes:
    return state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state)
