"""Runs several forwards of one model side by side, layer call by layer call.

[Note: Lock-step]
Both passes of a step are the model's own forward, each on a thread of its own, and one of them runs
at a time: as a layer call ends, its thread hands over to the other one. So both passes have run
layer k before the first of them begins layer k + 2, and a block is uploaded once for both. Code
between layers (masks, positions, residual streams, losses) is whatever the model has, and runs once
per pass on that pass's values. Making each layer call twice in one forward would be wrong where
such code depends on the values, and copied model classes would have to follow every architecture.

Each pass has its own random numbers: the state of the generators is exchanged at each hand-over,
and all passes start from one state. So dropout draws the same masks in both. Afterwards the
generators are where the first pass has left them.

A thread takes over what the calling thread has set: grad mode, autocast, device, stream, context
variables. If a pass fails, the others end at their next hand-over, and the error is raised.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from hf_pyao.engine.rerun.generators import RandomState
from hf_pyao.engine.transfer.compute_streams import current_stream

T = TypeVar("T")


class _Abandoned(BaseException):
    """Ends a pass because another one has failed."""


class LockStep:
    """Passes that run in turns.

    Each run has a state of its own: if an interrupt comes as a thread is started, the thread may
    begin after its run is over. It finds then that the run has failed, and ends.

    Args:
        device: where they compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._run: _Run | None = None

    def run(self, passes: Sequence[Callable[[], T]]) -> list[T]:
        """Run *passes* in turns; return what they return.

        The first runs on the calling thread.

        Raises:
            BaseException: what the first pass that failed has raised.
        """
        self._run = _Run(self._device)
        return self._run.run(passes)

    def hand_over(self) -> None:
        """Let the next pass run up to its hand-over; outside of a pass nothing is done."""
        if self._run is not None:
            self._run.hand_over()


class _Run:
    """One run of passes; see :class:`LockStep`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._changed = threading.Condition()
        self._turn = 0
        self._runs: list[bool] = []
        """By pass, whether it has not ended."""
        self._states: list[RandomState] = []
        self._errors: list[BaseException] = []
        self._numbers: dict[int, int] = {}
        """By thread the pass that runs on it."""

    def run(self, passes: Sequence[Callable[[], T]]) -> list[T]:
        """Run *passes*; may be called once."""
        start = RandomState([self._device])
        self._states = [start] * len(passes)
        self._runs = [True] * len(passes)
        results: list[Any] = [None] * len(passes)
        threads = [
            self._thread(number, each, results) for number, each in enumerate(passes) if number
        ]
        try:
            try:
                for thread in threads:
                    thread.start()
                self._pass(0, passes[0], results)
            finally:
                self._join(threads)
        finally:  # once more: an interrupt may have come before the other call had begun
            self._join(threads)
            self._states[0].restore()
        if self._errors:
            raise self._errors[0]
        return results

    def hand_over(self) -> None:
        """Let the next pass run, if the calling thread runs one."""
        number = self._numbers.get(threading.get_ident())
        if number is None or (sum(self._runs) < 2 and not self._errors):
            return
        self._states[number] = self._states[number].now()
        with self._changed:
            self._pass_on(number)
            self._wait(number)
        if self._errors:
            raise _Abandoned
        self._states[number].restore()

    def _wait(self, number: int) -> None:
        """Wait for the turn of a pass, or for one that fails."""
        self._changed.wait_for(lambda: self._turn == number or bool(self._errors))

    def _end(self, number: int) -> None:
        """Note that a pass has ended; it may be called again."""
        with self._changed:
            self._runs[number] = False
            if self._turn == number or self._errors:
                self._pass_on(number)
            self._changed.notify_all()  # also where an interrupt came between turn and notice

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for the end of *threads*, whatever interrupts it: they use the model.

        Args:
            threads: those of all passes but the first, which is over; not all may have started.
        """
        interrupt = None
        while True:
            try:
                if self._runs[0]:  # it could not note its end
                    self._errors.append(_Abandoned())
                self._end(0)
                for thread in threads:
                    if thread.ident is not None:
                        thread.join()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _pass_on(self, number: int) -> None:
        """Give the turn to the next pass that runs."""
        for step in range(1, len(self._runs) + 1):
            following = (number + step) % len(self._runs)
            if self._runs[following]:
                self._turn = following
                break
        self._changed.notify_all()

    def _pass(self, number: int, run: Callable[[], Any], results: list[Any]) -> None:
        self._numbers[threading.get_ident()] = number
        try:
            with self._changed:
                self._wait(number)
            if not self._errors:
                self._states[number].restore()
                results[number] = run()
                self._states[number] = self._states[number].now()
        except _Abandoned:
            pass
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._numbers.pop(threading.get_ident(), None)
            self._end(number)

    def _thread(self, number: int, run: Callable[[], Any], results: list[Any]) -> threading.Thread:
        context, surroundings = contextvars.copy_context(), Surroundings(self._device)

        def target() -> None:
            with surroundings:
                context.run(self._pass, number, run, results)

        return threading.Thread(target=target, name=f"pyao-pass-{number}", daemon=True)


class Surroundings:
    """What torch keeps for each thread, taken from the calling one and put on another.

    Args:
        device: where compute runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = current_stream(device)
        self._has_gradients = torch.is_grad_enabled()
        self._caches = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", device.type))
            if torch.amp.is_autocast_available(kind)
        ]

    def __enter__(self) -> None:
        torch.set_grad_enabled(self._has_gradients)
        torch.set_autocast_cache_enabled(self._caches)
        for kind, is_enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        if self._stream is not None:
            torch.accelerator.set_device_index(self._device.index or 0)
            torch.accelerator.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        """Leave them: the thread ends."""
