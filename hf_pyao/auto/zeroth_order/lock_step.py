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

Attributes of modules belong to both passes. So a pass that has changed one (a value that later
layers read, a counter, a cache that is filled at first use) keeps the turn to its end, and the
other one follows it, as in the plain loop. Then blocks are uploaded for each pass. What is seen is
that of ``engine.rerun.guard``: up to a pass's first hand-over in all modules, later in the layer
that has run and outside of layers.

A thread takes over what the calling thread has set: modes in Python, inference and grad mode,
autocast, device, stream, context variables. If a pass fails, the others end at their next
hand-over, and the error is raised.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn, overrides
from torch.utils import _python_dispatch

from hf_pyao.engine.rerun.generators import RandomState
from hf_pyao.engine.rerun.guard import Look, change, look_at
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
        modules: of the model.
        layers: which are called one after the other.
    """

    def __init__(
        self,
        device: torch.device,
        modules: Iterable[nn.Module] = (),
        layers: Iterable[nn.Module] = (),
    ) -> None:
        self._device = device
        inside = {inner for layer in layers for inner in layer.modules()}
        self._modules = [(weakref.ref(each), each not in inside) for each in modules]
        """The modules, each with whether it is outside of layers."""
        self._run: _Run | None = None

    def run(self, passes: Sequence[Callable[[], T]]) -> list[T]:
        """Run *passes* in turns; return what they return.

        The first runs on the calling thread.

        Raises:
            BaseException: what the first pass that failed has raised.
        """
        self._run = _Run(self._device, self._look)
        try:
            return self._run.run(passes)
        finally:
            self._run = None

    def _look(self, *, at_all: bool) -> Look:
        found = [ref() for ref, is_outside in self._modules if at_all or is_outside]
        return look_at(vars(module) for module in found if module is not None)

    def hand_over(self) -> None:
        """Let the next pass run up to its hand-over; outside of a pass nothing is done."""
        if self._run is not None:
            self._run.hand_over()

    @contextlib.contextmanager
    def layer_call(self, layer: nn.Module) -> Iterator[None]:
        """Hand over as a call of *layer* ends, unless this pass has changed attributes."""
        before = look_at(map(vars, layer.modules()))
        yield
        if self._run is not None:
            if change(before, look_at(map(vars, layer.modules())), list):
                self._run.keep_turn()
            self._run.hand_over()


class _Run:
    """One run of passes; see :class:`LockStep`."""

    def __init__(self, device: torch.device, look: Callable[..., Look]) -> None:
        self._device = device
        self._look = look
        self._before: Look | None = None
        """At the modules, as the pass that runs has got the turn."""
        self._begun: set[int] = set()
        """Passes that have handed over."""
        self._keeping: set[int] = set()
        """Passes that keep the turn to their end."""
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
        assert self._before is not None
        if change(self._before, self._look(at_all=number not in self._begun), list):
            self._keeping.add(number)
        if number in self._keeping and not self._errors:
            return
        self._begun.add(number)
        self._states[number] = self._states[number].now()
        with self._changed:
            self._pass_on(number)
            self._wait(number)
        if self._errors:
            raise _Abandoned
        self._begin_turn(number)

    def keep_turn(self) -> None:
        """Let the calling thread's pass run to its end before another one."""
        number = self._numbers.get(threading.get_ident())
        if number is not None:
            self._keeping.add(number)

    def _begin_turn(self, number: int) -> None:
        self._states[number].restore()
        self._before = self._look(at_all=number not in self._begun)

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
                self._begin_turn(number)
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
            with surroundings.put_on():
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
        self._function_modes = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        self._dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack()
        self._is_inference = torch.is_inference_mode_enabled()
        self._has_gradients = torch.is_grad_enabled()
        self._caches = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", device.type))
            if torch.amp.is_autocast_available(kind)
        ]

    @contextlib.contextmanager
    def put_on(self) -> Iterator[None]:
        """Have the calling thread, which ends behind this context, carry them."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._is_inference))
            self._set()
            for mode in self._function_modes:  # not entered: that may do more, and is done
                overrides._push_mode(mode)  # type: ignore[no-untyped-call]
                stack.callback(overrides._pop_mode)
            for mode in self._dispatch_modes:
                _python_dispatch._push_mode(mode)
                stack.callback(_python_dispatch._pop_mode, getattr(mode, "_mode_key", None))
            yield

    def _set(self) -> None:
        torch.set_grad_enabled(self._has_gradients)
        torch.set_autocast_cache_enabled(self._caches)
        for kind, is_enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        if self._stream is not None:
            torch.accelerator.set_device_index(self._device.index or 0)
            torch.accelerator.set_stream(self._stream)
