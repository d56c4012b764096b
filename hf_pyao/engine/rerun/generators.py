"""The states of random number generators: of torch, Python and numpy, shared ones and others.

[Note: Shared generators]
All threads draw from the same default generators. A second run sets their state, draws, and sets
the state back. If another thread draws in between, or between the note of a state and the draw in
forward, the second run draws other numbers than forward did. Two things prevent that. Attached
models keep each other out: :func:`exclusive_draws` is held during a layer call that notes a state,
during a second run, and around a single operation that is recorded with its state. And where other
threads may draw that know nothing of this (:func:`may_be_disturbed`), what draws runs only once.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_DRAWS = threading.RLock()
_MOST_WAIT_S = 60.0


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


class ExclusiveDraws:
    """Holds the default generators of the process for the calling thread, from `start` to `stop`.

    It may be used in a ``with`` statement. ``stop`` may be called again, also by the code that
    cleans up after an interrupt. Wherever an interrupt comes, the thread holds them no longer once
    this object is let go.
    """

    _is_outermost = False  # of the class, so that `__del__` finds it wherever an interrupt came

    def start(self) -> None:
        """Wait for the other threads that hold them.

        The wait is bounded: a thread may wait for this one while it holds them (a backward that is
        run inside of a layer's forward, on torch's thread of the device).
        """
        if not _is_held_here():
            # First: if an interrupt comes as the lock was just acquired, `stop` releases it.
            self._is_outermost = True
            _DRAWS.acquire(timeout=_MOST_WAIT_S)

    def stop(self) -> None:
        """Let other threads draw, unless this thread held them before `start`."""
        if self._is_outermost:
            if _is_held_here():
                _DRAWS.release()
            self._is_outermost = False

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __del__(self) -> None:
        """Stop where an interrupt came before `__exit__` was called."""
        self.stop()


def _is_held_here() -> bool:
    """Say whether the calling thread holds the generators."""
    return bool(_DRAWS._is_owned())  # type: ignore[attr-defined]  # as threading.Condition does


def exclusive_draws() -> ExclusiveDraws:
    """Hold the default generators for the calling thread, in a ``with`` statement."""
    return ExclusiveDraws()


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
            and same_state(self._numpy, other._numpy)
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
        """Put the state at the end back to that at the beginning, if states are set inside."""
        if not self._states:
            yield
            return
        with self._states[0].now().kept():
            yield


def state_of(generator: Any) -> Any:
    """Return where *generator*, of torch, Python or numpy, is."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return copy.deepcopy(_bits_of(generator).state)


def set_state(generator: Any, state: Any) -> None:
    """Put *generator* to where :func:`state_of` has found it."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        _bits_of(generator).state = state


def same_state(left: Any, right: Any) -> bool:
    """Compare two states of a generator."""
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    return pickle.dumps(left) == pickle.dumps(right)


def _bits_of(generator: Any) -> Any:
    """Return what numpy's *generator*, of either kind, draws from."""
    return getattr(generator, "bit_generator", None) or generator._bit_generator


def _numpy_random() -> Any:
    """Return numpy's module of random numbers, if anyone has imported it."""
    return sys.modules.get("numpy.random")
