"""Runs both forwards of a step side by side, layer call by layer call.

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

Attributes of modules belong to both passes. So the passes of the first step run one after the
other, and ``engine.rerun.guard`` looks at all modules as each layer call of the second one ends. A
model that changes attributes in its forward (a value that later layers read, a counter, a list)
runs so in all steps; blocks are uploaded for each pass then. If attributes are others only after a
later step, both passes of this step run again, one after the other, and so do all that follow.

A thread takes over what the calling thread has set: modes in Python, inference mode, autocast,
device, stream, context variables. If a pass fails, the other one ends at its next hand-over, and
the error is raised.
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
from hf_pyao.engine.rerun.surroundings import Surroundings
from hf_pyao.engine.transfer.compute_streams import current_stream

T = TypeVar("T")


class _Abandoned(BaseException):
    """Ends a pass because another one has failed."""


class LockStep:
    """Runs the passes of a step, of which there is one or two.

    Args:
        device: where they compute.
        modules: of the model.
    """

    def __init__(self, device: torch.device, modules: Iterable[nn.Module] = ()) -> None:
        self._device = device
        self._modules = [weakref.ref(each) for each in modules]
        self._may_alternate: bool | None = None
        """Whether forwards leave all attributes as they are; None: it is not known yet."""
        self._before: Look | None = None
        """What modules hold, while each layer call looks for changes."""
        self._turns: _Turns | None = None

    def run(self, passes: Sequence[Callable[[], T]]) -> list[T]:
        """Run *passes*, in turns if they may; return what they return.

        Raises:
            BaseException: what the first pass that failed has raised.
        """
        start = RandomState([self._device])
        if self._may_alternate and len(passes) > 1:
            before, self._turns = self._look(), _Turns(self._device)
            try:
                results = self._turns.run(passes)
            finally:
                self._turns = None
            if not change(before, self._look(), list):
                return results
            self._may_alternate = False
            start.restore()
        return self._one_by_one(passes, start)

    def _one_by_one(self, passes: Sequence[Callable[[], T]], start: RandomState) -> list[T]:
        results = [passes[0]()]
        end = start.now()
        try:
            for each in passes[1:]:
                start.restore()
                if self._may_alternate is None:
                    self._before = self._look()
                results.append(each())
                if self._before is not None:
                    self.end_layer(1)  # for what has run behind the last layer
                    self._may_alternate = self._may_alternate is None
        finally:
            self._before = None
            end.restore()
        return results

    def _look(self) -> Look:
        return look_at(vars(module) for ref in self._modules if (module := ref()) is not None)

    def end_layer(self, number: int) -> None:
        """Note that a layer call of pass *number* has ended: let the other one run up to there."""
        if self._turns is not None:
            self._turns.hand_over(number)
        elif self._before is not None and change(self._before, self._look(), list):
            self._may_alternate = False


class _Turns:
    """One run of two passes; an interrupt leaves no thread behind.

    Args:
        device: where they compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = [RandomState([device])] * 2
        self._runs = [True, True]
        """By pass, whether it has not ended."""
        self._turn = 0
        self._changed = threading.Condition()
        self._results: list[Any] = [None, None]
        self._errors: list[BaseException] = []

    def run(self, passes: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run *passes*, the first on the calling thread; may be called once."""
        context, carried = contextvars.copy_context(), _carried(self._device)

        def second() -> None:
            with carried():
                context.run(self._play, 1, passes[1])

        # If an interrupt comes as the thread starts, it finds that the run has failed, and ends.
        thread = threading.Thread(target=second, name="pyao-pass-1", daemon=True)
        try:
            try:
                thread.start()
                self._play(0, passes[0])
            finally:
                self._join(thread)
        finally:  # once more: an interrupt may have come before the other call had begun
            self._join(thread)
            self._states[0].restore()
        if self._errors:
            raise self._errors[0]
        return self._results

    def hand_over(self, number: int) -> None:
        """Let the other pass run up to its hand-over, if it has not ended."""
        if self._runs[1 - number] or self._errors:
            self._states[number] = self._states[number].now()
            with self._changed:
                self._turn = 1 - number
                self._changed.notify_all()
            self._await(number)

    def _await(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == number or bool(self._errors))
        if self._errors:
            raise _Abandoned
        self._states[number].restore()

    def _play(self, number: int, run: Callable[[], Any]) -> None:
        try:
            self._await(number)
            self._results[number] = run()
            self._states[number] = self._states[number].now()
        except _Abandoned:
            pass
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._end(number)

    def _end(self, number: int) -> None:
        with self._changed:
            self._runs[number] = False
            self._turn = 1 - number
            self._changed.notify_all()

    def _join(self, thread: threading.Thread) -> None:
        """Wait for the end of *thread*, whatever interrupts it: it uses the model."""
        interrupt = None
        while True:
            try:
                if self._runs[0]:  # it could not note its end
                    self._errors.append(_Abandoned())
                self._end(0)
                if thread.ident is not None:
                    thread.join()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _carried(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return what has another thread carry what torch keeps for the calling one."""
    around, stream = Surroundings([device], with_random=False), current_stream(device)
    is_inference = torch.is_inference_mode_enabled()
    functions = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    dispatch = _python_dispatch._get_current_dispatch_mode_stack()

    @contextlib.contextmanager
    def carried() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(is_inference))
            stack.enter_context(torch.no_grad())
            stack.enter_context(around.put_back())
            if stream is not None:
                torch.accelerator.set_device_index(device.index or 0)
                torch.accelerator.set_stream(stream)
            for mode in functions:  # not entered: that may do more, and is done
                overrides._push_mode(mode)  # type: ignore[no-untyped-call]
                stack.callback(overrides._pop_mode)
            for mode in dispatch:
                _python_dispatch._push_mode(mode)
                stack.callback(_python_dispatch._pop_mode, getattr(mode, "_mode_key", None))
            yield

    return carried
