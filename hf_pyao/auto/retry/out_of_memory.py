"""Runs micro-batches, and runs one again under a tighter plan where it did not fit.

[Note: Running again]
A try that fails leaves tensors behind: in the frames of its traceback, in the graph, in copies
under way. All of it is released before the next try: frames are cleared, the forward's tapes are
closed (buffers go with the graph's nodes), autocast's casts and the allocator's cache are emptied.
Then gradients, buffers and random numbers are put back (``engine.rerun.micro_batch_state``), and
the next try computes the same bits: the tighter plan changes where saved tensors are, not what they
hold. A try that cannot be undone, or not without other ranks (``collectives``), ends the run with a
message.
"""

from __future__ import annotations

import gc
import logging
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar

import torch
from torch import nn

from hf_pyao.auto.ranks.collectives import (
    is_in,
    num_collectives,
    reason_not_alone,
    reason_of_wrappers,
)
from hf_pyao.auto.retry.failure_message import MemoryFailure, Remedies
from hf_pyao.auto.retry.second_run_guard import SecondRunGuard
from hf_pyao.auto.retry.tightening import Tightening
from hf_pyao.engine.rerun.added_gradients import AddedOnce
from hf_pyao.engine.rerun.micro_batch_state import MicroBatchState
from hf_pyao.engine.rerun.module_state import ModuleState
from hf_pyao.engine.rerun.other_gradients import find_other, newest_backward
from hf_pyao.engine.runtime.lifecycle import Lifecycle
from hf_pyao.engine.transfer.graph_task import NO_TASK
from hf_pyao.errors import PyAOError, warn
from hf_pyao.plan.hardware.device_limit import release_cached

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_MOST_TRIES = 8
"""However often a tightening finds something tighter."""


class OutOfDeviceMemoryError(PyAOError, torch.OutOfMemoryError):
    """A micro-batch did not fit into device memory, and could not be run again in less."""


class MicroBatchRunner:
    """Runs the micro-batches of one attached model.

    Args:
        model: held weakly.
        lifecycle: drives the engine on it; held weakly, since the model's hooks own it.
        remedies: what the user may change, for messages.
        device: what the model is on.
        tightening: makes room.
        on_tightened: told what is done from now on, each time.
        guard: says whether second runs gave backward other bits than forward had.
    """

    def __init__(
        self,
        model: nn.Module,
        lifecycle: Lifecycle,
        remedies: Remedies,
        device: torch.device,
        tightening: Tightening,
        on_tightened: Callable[[str], None],
        guard: SecondRunGuard,
    ) -> None:
        self._guard = guard
        self._model = weakref.ref(model)
        self._lifecycle = weakref.ref(lifecycle)
        self._engine = lifecycle.engine
        self._remedies = remedies
        self._device = device
        self.tightening = tightening
        """Asked for a tighter plan; may be exchanged."""
        self._on_tightened = on_tightened
        self._state: ModuleState | None = None
        self._newest_backward = NO_TASK

    def run(self, function: Callable[[], Result], *, writes_only_this_model: bool) -> Result:
        """Run *function*; see :meth:`hf_pyao.Offloader.run_micro_batch`."""
        model = self._model()
        if model is None:
            return function()
        state = self._state
        if state is None:
            state = self._state = ModuleState([model], "the model")
            self._newest_backward = newest_backward()
        attempt = _Attempt(
            self._engine.num_forwards,
            max(self._newest_backward, self._engine.unpacker.newest_task),
            state,
            writes_only_this_model=writes_only_this_model,
        )
        del model
        while True:
            try:
                result = attempt.run(function)
                self._guard.raise_if_wrong()
                return result
            except OutOfDeviceMemoryError:
                raise
            except torch.OutOfMemoryError as error:
                self._make_room(error, attempt)
            # Only here, where the error is gone, and all that it held.
            self._release(attempt)
            attempt.undo()  # again: what was released may have changed something

    def _make_room(self, error: torch.OutOfMemoryError, attempt: _Attempt) -> None:
        """Find a tighter policy for the next try.

        Raises:
            OutOfDeviceMemoryError: there is none, or no next try.
        """
        failure = MemoryFailure.of(error, self._engine, self._device, attempt.since)
        reason = attempt.reason_not_again(error, self._model())
        can_be_undone = not reason
        sentence = None
        if can_be_undone:
            attempt.undo()  # first: a plan is made for the model as the micro-batch found it
        if can_be_undone and attempt.num_tries < _MOST_TRIES:
            sentence = self.tightening.tighter(error)
        _let_go(error, attempt.outer_error)
        self._guard.forget()
        (self._lifecycle() or self._engine).give_up(attempt.since)
        if sentence is not None:
            warn(
                logger,
                "micro-batch-ran-again",
                "a micro-batch did not fit into device memory %s. It runs again: from now on %s.",
                failure.describe(),
                sentence,
            )
            self._on_tightened(sentence)
            return
        self._release(attempt)
        if can_be_undone:
            reason = f"nothing tighter is left after {attempt.num_tries} tries"
        message = failure.explain(self._remedies, reason)
        raise OutOfDeviceMemoryError(message, key="out-of-memory") from error

    def _release(self, attempt: _Attempt) -> None:
        """Give back what a failed try has held."""
        torch.clear_autocast_cache()
        gc.collect()  # frames that held the error which held them
        self._engine.link.release_done()
        for device in attempt.devices:
            release_cached(device)


class _Attempt:
    """One micro-batch, from its first try on."""

    def __init__(
        self,
        since: int,
        newest_backward: int,
        model: ModuleState,
        *,
        writes_only_this_model: bool,
    ) -> None:
        self.since = since
        """Forwards that the engine had seen when it began."""
        self.num_tries = 0
        self.outer_error = sys.exc_info()[1]
        """What was being handled when it began, which is not its own."""
        self._newest_backward = newest_backward
        self._writes_only_this_model = writes_only_this_model
        self._collectives = num_collectives()
        self._state = MicroBatchState(model)

    def run(self, function: Callable[[], Result]) -> Result:
        """Try it, from what it began with."""
        if self.num_tries:  # a tighter plan may have recorded steps, with a backward each
            self._newest_backward = newest_backward()
        self.num_tries += 1
        added = self._state.added
        once = AddedOnce(added)
        with once.set_aside():
            result = function()
        if once.is_amiss:
            raise OutOfDeviceMemoryError(
                "a micro-batch ran again that had not fitted into device memory, and did not write "
                "the gradients that it wrote the first time: what is there now is not right. Run "
                "forward and backward alone in it: neither zero_grad() nor anything else that "
                "changes gradients, and nothing that differs from run to run.",
                key="second-run-differs",
            )
        return result

    def reason_not_again(self, error: BaseException, model: nn.Module | None) -> str:
        """Say why it cannot run again, or return an empty string."""
        if model is None:
            return "the model is gone"
        trace = error.__traceback__
        in_backward = is_in(trace, "/torch/autograd/", "_engine_run_backward")
        newest = newest_backward()
        num_backwards = newest - self._newest_backward - 1
        self._newest_backward = newest
        of_tensors = self._state.reason_not_undone(
            after_backward=in_backward or num_backwards > 0, in_backward=in_backward
        )
        return (
            reason_not_alone(self._collectives, trace)
            or reason_of_wrappers(model, trace, has_written=self._state.has_written)
            or of_tensors
            or self._reason_of_others(
                num_backwards, trace if in_backward and num_backwards == 1 else None
            )
        )

    def _reason_of_others(self, num_backwards: int, failed: TracebackType | None) -> str:
        """Look for gradients of others that it may have written."""
        if self._writes_only_this_model or num_backwards <= 0:
            return ""
        other = find_other(self._state.parameters, failed)
        if other is None:
            return ""
        return (
            f"a tensor of shape {tuple(other.shape)} outside of the model has a gradient, which it "
            "may have written (clear gradients that are not needed, or pass "
            "writes_only_this_model=True)"
        )

    @property
    def devices(self) -> Iterable[torch.device]:
        """Those that the model is on, the CPU apart."""
        return self._state.devices

    def undo(self) -> None:
        """Put everything back that it began with."""
        self._state.undo()


def _let_go(error: BaseException, outer: BaseException | None) -> None:
    """Clear the frames that *error* came through, which hold the try's tensors."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        if each is None or each is outer or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        pending += [each.__cause__, each.__context__]
