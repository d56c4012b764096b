"""Segments: consecutive layer calls of which the first one's input is saved, and nothing else.

[Note: Segments]
In forward, each tensor that autograd saves in the segment is replaced by a place holder, which has
a number. When backward asks for the first of them, the segment's layers run once more, under grad;
what they save is counted again, and put into the place holders that still live. The run ends as
soon as the last of these has its tensor. The graph that it makes is thrown away: backward goes
through the first one.

A place holder dies with the graph node that holds it, and its tensor with it, so that memory is
freed as backward goes. A graph that is retained keeps its nodes: there, what was used is let go of
when the next segment runs again, and everything at the end of the backward pass. If backward asks
once more, in the same pass or another, the segment runs again.

Parameters are held as they are, and have no number.

[Note: Refused late]
Whether a layer call can run again is known for certain when it ends: it may have changed what it
was given, or a state that was not expected to change. So its place holders hold their tensors until
then. No more is alive at once than in backward, where the layer's tensors are all there. If the
call cannot run again, the engine takes them over as it does without segments, and the segment ends
before that call. Otherwise they are let go of.

[Note: One by one]
A segment that is nested fills the place holders of one layer at a time, so that the tensors of one
layer are there at once. Backward asks for its last layer first. The layers before it run again for
their outputs alone, which are the inputs of the layers behind them, and are held; then the last
one runs, and fills its place holders. When backward asks for the layer before, that one runs from
its input, which is let go of; and so on. So all layers but the last run twice.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hf_pyao.engine.recompute.kept_attention import SeenAttention
from hf_pyao.engine.recompute.second_run import (
    AllCollectedError,
    Collector,
    Part,
    PlaceHolder,
    for_no_one,
)
from hf_pyao.engine.recompute.segment_calls import MadeBefore, RecordedCall, SegmentInput
from hf_pyao.engine.recompute.segment_keeper import Keeper
from hf_pyao.engine.recompute.verification import ForwardCheck, Noted, may_be_unsteady
from hf_pyao.engine.rerun.versions import version_of
from hf_pyao.engine.runtime.saved_tensor import Handle
from hf_pyao.engine.runtime.streamed_weights import StreamedTensor
from hf_pyao.engine.runtime.tape import LayerCall
from hf_pyao.engine.transfer.graph_task import NO_TASK, current_graph_task
from hf_pyao.engine.transfer.layout import has_bytes, has_storage
from hf_pyao.errors import SavedTensorModifiedError

CHANGES_INPUT = "it changes in place what it is given"
SAVES_NO_STORAGE = "it saves a sparse or nested tensor, which has no bytes to compare"
SAVES_UNDER_TRACING = "it saves tensors while a graph is traced (torch.func.linearize)"
FINAL = (CHANGES_INPUT, SAVES_NO_STORAGE, SAVES_UNDER_TRACING)
"""Reasons for which the next calls cannot run again either."""


class FilledSegments:
    """The segments that ran again and may hold tensors still."""

    def __init__(self) -> None:
        self._segments: weakref.WeakSet[Segment] = weakref.WeakSet()
        self.num_runs = 0
        """How often a segment filled place holders, or a layer of one that is nested."""

    def add(self, segment: Segment) -> None:
        """Count that *segment* runs again, and have the others forget what was used."""
        self.num_runs += 1
        for other in list(self._segments):
            if other is not segment:
                other.forget(is_used_only=True)
        self._segments.add(segment)

    def discard(self, segment: Segment) -> None:
        """Forget *segment*, which holds nothing any more."""
        self._segments.discard(segment)


class Segment:
    """Up to so many consecutive layer calls, from their forward to their backward.

    Args:
        first: the engine's call of its first layer.
        hidden: what that layer gets.
        keeper: keeps *hidden*, and what kernels of attention return.
        filled: knows the segments that hold tensors.
        running: given the name of the first layer that runs again, returns what is entered
            meanwhile.
        is_nested: the tensors of one layer at a time are there; see [Note: One by one].
        check: compares what runs again with the first run; None if this forward is not checked.
    """

    def __init__(
        self,
        first: LayerCall,
        hidden: Tensor,
        keeper: Keeper,
        filled: FilledSegments,
        running: Callable[[str], contextlib.AbstractContextManager[Any]],
        *,
        is_nested: bool = False,
        check: ForwardCheck | None = None,
    ) -> None:
        self._check = check
        self._lock = threading.RLock()  # see [Note: Threads] in engine/runtime/unpacking.py
        self.calls: list[RecordedCall] = []
        self.tape = first.tape
        self._first = first
        self._layer_calls: list[LayerCall] = []
        self._parts: list[Part] = []
        self._keeper = keeper
        self._filled = filled
        self._running = running
        self._is_nested = is_nested
        self._hidden: Tensor | None = hidden
        """What its first layer gets, until that has saved something or ends."""
        self._hidden_version = version_of(hidden)
        self._requires_grad = hidden.requires_grad
        self._kept_hidden: Callable[[], Tensor | None] = lambda: None
        self._input: Handle | None = None
        self._attention: SeenAttention | None = None
        self._made: list[tuple[weakref.ref[Tensor], int, MadeBefore]] = []
        self._made_again: dict[MadeBefore, Tensor] = {}
        """What parts get that did not fill their place holders yet, from layers before them."""
        self._task = NO_TASK
        """The backward pass in which it ran again last."""
        self._reason = ""
        """Why its newest call cannot run again; empty if it can, for all that is known."""
        self._num_packed_before = 0
        """Place holders of the newest part that are not of the newest call."""

    def _name_of(self, part: Part) -> str:
        """Name the layers of *part*, for messages."""
        first, last = self.calls[part.start].name, self.calls[max(part.start, part.stop - 1)].name
        return f"layer {first!r}" if first == last else f"layers {first!r} to {last!r}"

    # ---- forward -------------------------------------------------------------------------------

    @property
    def has_saved(self) -> bool:
        """True once autograd saved anything but parameters in it."""
        return self._input is not None

    def add(
        self, call: LayerCall, recorded: RecordedCall, attention: SeenAttention | None = None
    ) -> None:
        """Append a layer call, which begins; *attention* sees its kernels."""
        self._attention = attention
        self._reason = ""
        if not self._parts or self._is_nested:
            self._parts.append(Part(len(self.calls)))
        self._num_packed_before = len(self._parts[-1].place_holders)
        self._layer_calls.append(call)
        self.calls.append(recorded)
        self._parts[-1].reach_to(len(self.calls))

    def stand_in_for(self, tensor: Tensor) -> SegmentInput | MadeBefore | None:
        """Return what stands for *tensor*, which its next call is given, if it is made here."""
        if tensor is self._hidden and not self.calls:
            return SegmentInput()
        return self.made_by(tensor)

    def made_by(self, tensor: Tensor, *, last_only: bool = False) -> MadeBefore | None:
        """Return which of its layers returned *tensor*, if one did and it was not changed since."""
        for ref, version, made in reversed(self._made):
            if last_only and made.call != len(self.calls) - 1:
                return None
            if ref() is tensor:
                return made if version == version_of(tensor) else None
        return None

    def pack(self, call: LayerCall, tensor: Tensor) -> PlaceHolder | StreamedTensor:
        """Take over *tensor*, which autograd saves in it; its pack hook, but for the first."""
        if type(tensor) is not Tensor and isinstance(tensor, Parameter):
            return PlaceHolder(self._parts[-1], tensor)
        streamed = self._keeper.streamed(call, tensor)
        if streamed is not None:
            return streamed
        if not has_storage(tensor) or not has_bytes(tensor):
            self._reason = SAVES_UNDER_TRACING if has_storage(tensor) else SAVES_NO_STORAGE
            return self._parts[-1].hold(tensor)
        if self._hidden is not None:
            self._keep_input(self._hidden)
        if self._attention is not None:
            self._attention.packed(tensor, functools.partial(self._keeper.keep, call))
        self._keeper.note_dropped(call, tensor)
        return self._parts[-1].pack(call.fqn, tensor, self._check)

    def _keep_input(self, hidden: Tensor) -> None:
        self._hidden = None
        if version_of(hidden) != self._hidden_version:
            self._reason = CHANGES_INPUT
            return
        self._kept_hidden = weakref.ref(hidden)
        self._input = self._keeper.keep_input(self._first, hidden)

    def layer_ended(self, outputs: Sequence[Tensor]) -> str:
        """Record what the newest of its layers returned.

        Returns:
            Why that call cannot run again, empty if it can. If not, the engine has taken over what
            it saved, and the segment has ended: see [Note: Refused late].
        """
        self._hidden = None  # if nothing was saved, there is nothing to run again for
        recorded, part = self.calls[-1], self._parts[-1]
        if len(part.place_holders) > self._num_packed_before:
            kept = self._kept_hidden() if len(self.calls) == 1 else None
            if kept is not None and version_of(kept) != self._hidden_version:
                self._reason = CHANGES_INPUT
            if recorded.changed_argument() or (self._is_nested and self._is_changed_by(recorded)):
                self._reason = CHANGES_INPUT
            self._reason = self._reason or recorded.reason_not_again()
            if self._reason:
                self._hand_over(part)
                return self._reason
            for ref in part.place_holders[self._num_packed_before :]:
                place_holder = ref()
                if place_holder is not None:
                    place_holder.clear()
            if self._attention is not None:
                recorded.keeps_attention(self._attention.calls)
        self._attention = None
        index = len(self.calls) - 1
        self._made += [
            (weakref.ref(tensor), version_of(tensor), MadeBefore(index, ordinal))
            for ordinal, tensor in enumerate(outputs)
        ]
        return ""

    def _hand_over(self, part: Part) -> None:
        """Let the engine keep what the newest call saved, which does not run again."""
        self._attention = None
        call, keeper = self._layer_calls[-1], self._keeper

        def keep(tensor: Tensor) -> Callable[[], Tensor]:
            handle = keeper.keep(call, tensor)
            return lambda: keeper.give(handle, call)

        for place_holder in part.taken_off(self._num_packed_before):
            place_holder.keep(keep)
        if len(self.calls) == 1:
            self._input = None

    def _is_changed_by(self, recorded: RecordedCall) -> bool:
        """Say whether a call has changed in place what a layer before it returned.

        Where layers run one by one, that is held, and may be given twice.
        """
        needs = recorded.needs
        return any(
            made in needs and (tensor := ref()) is not None and version_of(tensor) != version
            for ref, version, made in self._made
        )

    # ---- backward ------------------------------------------------------------------------------

    def unpack(self, saved: PlaceHolder | StreamedTensor) -> Tensor:
        """Return the tensor that *saved* stands for; its unpack hook. Layers run again if need be.

        Raises:
            SavedTensorModifiedError: the tensor was changed in place.
        """
        if saved.give is not None:
            return saved.give()
        assert isinstance(saved, PlaceHolder)
        task = current_graph_task()
        with self._lock:
            is_in_forward = saved.tensor is not None and saved.task == NO_TASK
            if saved.tensor is None or saved.task not in (NO_TASK, task):
                self._run_again(saved.part, task)
            tensor = saved.use()
            if task == NO_TASK and not is_in_forward:
                self.forget(is_used_only=False)  # looked at outside of a backward pass
        if version_of(tensor) != saved.version:
            raise SavedTensorModifiedError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation, in {self._name_of(saved.part)}. Use the out-of-place form of "
                "the operation, and step the optimizer after backward. (It fails in the same way "
                "without hf_pyao.)",
                key="changed-before-second-run",
            )
        return tensor

    def _run_again(self, part: Part, task: int) -> None:
        """Run its layers again, and fill the place holders of *part* for graph task *task*.

        Raises:
            RecomputationError: they do not save what they saved in forward.
        """
        if task != self._task:
            self.forget(is_used_only=False)
            if task != NO_TASK:
                forget = functools.partial(_forget, weakref.ref(self))
                torch.autograd.Variable._execution_engine.queue_callback(forget)
            self._task = task
        for each in self._parts:
            each.forget(is_used_only=each is not part)
        self._filled.add(self)
        call = self._layer_calls[part.stop - 1]
        with self._running(self.calls[part.start].name), torch.enable_grad():
            self._fill(part, task, call)

    def _fill(self, part: Part, task: int, call: LayerCall) -> None:
        """Run the layers of *part*, in the backward of *call*."""
        made = self._inputs_of(part, call)
        name, check = self._name_of(part), self._check
        streamed = functools.partial(self._keeper.streamed, call)
        rehearsed: Mapping[int, Noted] = {}
        devices = list(chain.from_iterable(each.devices for each in self.calls))
        if check is not None and check.runs_twice and may_be_unsteady(devices):
            rehearsal = Collector(name, part, streamed, None, check)
            self._run_part(part, dict(made), rehearsal, call, {})
            rehearsed = rehearsal.noted
        self._run_part(part, made, Collector(name, part, streamed, task, check), call, rehearsed)

    def _run_part(
        self,
        part: Part,
        made: dict[MadeBefore, Tensor],
        collector: Collector,
        call: LayerCall,
        rehearsed: Mapping[int, Noted],
    ) -> None:
        """Run the layers of *part*, which get *made*; *collector* gets what they save."""
        try:
            for index in range(part.start, part.stop):
                layer = self.calls[index].name
                outputs = self._run_call(index, made, collector.on(layer), call)
                made.update(outputs)
        except AllCollectedError as end:
            if end.collector is not collector:
                raise
        collector.end(rehearsed)

    def _inputs_of(self, part: Part, call: LayerCall) -> dict[MadeBefore, Tensor]:
        """Return what layers before *part* made that it gets; they run again if that is gone.

        What the parts between need is held, and nothing else any longer.
        """
        needed = {m for m in self._needs(part.start, part.stop) if m.call < part.start}
        if not needed <= self._made_again.keys():
            self._made_again = {}
            for index in range(part.start):
                needed_later = self._needs(index + 1, part.stop)
                self._made_again |= self._outputs_of(index, needed_later, call)
        given = {key: self._made_again[key] for key in needed}
        left = self._needs(1, part.start)
        self._made_again = {key: each for key, each in self._made_again.items() if key in left}
        return given

    def _outputs_of(
        self, index: int, wanted: set[MadeBefore], call: LayerCall
    ) -> dict[MadeBefore, Tensor]:
        """Return what one of its layers returns, for which it runs; its graph is let go of."""
        made = self._run_call(
            index,
            self._made_again,
            for_no_one(self.calls[index].name, functools.partial(self._keeper.streamed, call)),
            call,
        )
        return {
            key: tensor.detach().requires_grad_(tensor.requires_grad)
            for key, tensor in made.items()
            if key in wanted
        }

    def _needs(self, start: int, stop: int) -> set[MadeBefore]:
        """Return what its calls from *start* to before *stop* get from others of them."""
        return set().union(*(recorded.needs for recorded in self.calls[start:stop]))

    def _run_call(
        self,
        index: int,
        made: dict[MadeBefore, Tensor],
        while_it_runs: contextlib.AbstractContextManager[Any],
        call: LayerCall,
    ) -> dict[MadeBefore, Tensor]:
        """Run one of its layers again; return what it returned.

        Args:
            index: which of its calls.
            made: what the layers before it made that it gets.
            while_it_runs: entered around the layer.
            call: the layer call whose backward asks for it.
        """
        outputs = self.calls[index].run(
            None if index else self._given_hidden(call),
            made,
            while_it_runs,
            lambda handle: self._keeper.give(handle, call),
            self._keeper.rules,
        )
        return {MadeBefore(index, ordinal): tensor for ordinal, tensor in enumerate(outputs)}

    def _given_hidden(self, call: LayerCall) -> Tensor:
        assert self._input is not None
        try:
            hidden = self._keeper.give(self._input, call)
        except SavedTensorModifiedError as error:
            raise SavedTensorModifiedError(
                f"the input of layer {self.calls[0].name!r} was changed in place after it was "
                "given, and has to be given again in backward (checkpoint_every). Clone the tensor "
                "before changing it, or give checkpoint_every=0.",
                key="changed-before-second-run",
            ) from error
        if self._requires_grad and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()
        return hidden

    def forget(self, *, is_used_only: bool) -> None:
        """Let go of what its place holders hold, or of what backward got already.

        What parts still to run get from the layers before them is used by no one yet.
        """
        if not is_used_only:
            self._made_again = {}
        holds_more = [part.forget(is_used_only=is_used_only) for part in self._parts]
        if not any(holds_more):
            self._filled.discard(self)


def _forget(ref: weakref.ref[Segment]) -> None:
    """Let go of what a segment still holds at the end of a backward pass."""
    segment = ref()
    if segment is not None:
        segment.forget(is_used_only=False)
