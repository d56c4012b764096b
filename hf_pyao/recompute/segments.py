"""Segments: consecutive layer calls of which the first one's input is saved, and nothing else.

[Note: Segments]
In forward, each tensor that autograd saves in the segment is replaced by a place holder, which has
a number. When backward asks for the first of them, the segment's layers run once more, under grad;
what they save is counted again, and put into the place holders that still live. The run ends as
soon as the last of these has its tensor. The graph that it makes is thrown away: backward goes
through the first one.

A place holder dies with the graph node that holds it, and its tensor with it, so that memory is
freed as backward goes. A graph that is retained keeps its nodes: there, what was used is let go of
when the next segment runs again, and everything at the end of the backward pass. Whoever asks once
more, in the same pass or another, has the segment run again.

Parameters are held as they are, and have no number.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from hf_pyao.errors import RecomputationError, SavedTensorModifiedError
from hf_pyao.module_state import version_of
from hf_pyao.recompute.kept_attention import SeenAttention
from hf_pyao.recompute.operations import Rules
from hf_pyao.recompute.random_state import RandomState
from hf_pyao.recompute.segment_calls import MadeBefore, RecordedCall
from hf_pyao.runtime.saved_tensor import Handle
from hf_pyao.runtime.saved_tensor_hooks import Pack, pack_hook, pop_hooks, push_hooks
from hf_pyao.runtime.tape import LayerCall
from hf_pyao.transfer.graph_task import NO_TASK, current_graph_task

Meta = tuple[torch.Size, torch.dtype, torch.device]
"""What a tensor must have in common with the one that it stands in for."""


class Keeper(Protocol):
    """Keeps what a segment saves until backward asks for it."""

    rules: Rules
    """Of operators."""

    def keep_input(self, call: LayerCall, tensor: Tensor) -> Handle:
        """Take *tensor* over, the input of *call*."""
        ...

    def keep(self, call: LayerCall, tensor: Tensor) -> Handle:
        """Take *tensor* over, which the sub-module that runs has made."""
        ...

    def give(self, handle: Handle, call: LayerCall) -> Tensor:
        """Give it back to the backward of *call*."""
        ...


class KeptParameter:
    """Stands for a parameter that autograd saves."""

    __slots__ = ("layer", "tensor", "version")

    def __init__(self, tensor: Tensor, layer: str) -> None:
        self.tensor = tensor
        self.version = version_of(tensor)
        self.layer = layer


class PlaceHolder:
    """Stands for a tensor that autograd saves in a segment."""

    __slots__ = ("__weakref__", "_segment", "_task", "_tensor", "_version", "is_used")

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._tensor: Tensor | None = None
        self._version = 0
        self._task = NO_TASK
        self.is_used = False
        """True once backward got the tensor that it has now."""

    def fill(self, tensor: Tensor, task: int) -> None:
        """Hold *tensor* for the backward pass that is graph task *task*."""
        self._version = version_of(tensor)
        self._task = task
        self.is_used = False
        self._tensor = tensor

    def clear(self) -> None:
        """Let go of the tensor."""
        self._tensor = None

    def read(self) -> Tensor:
        """Return the tensor, for which the segment runs again if need be."""
        task = current_graph_task()
        segment = self._segment
        with segment.lock:
            tensor = self._tensor
            if tensor is None or self._task != task:
                segment.run_again(task)
                tensor = self._tensor
            if task == NO_TASK:
                segment.forget(is_used_only=False)  # looked at outside of a backward pass
            assert tensor is not None
            self.is_used = True
        if version_of(tensor) != self._version:
            raise SavedTensorModifiedError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation, in {segment.name}. Use the out-of-place form of the "
                "operation. (It fails in the same way without hf_pyao.)"
            )
        return tensor


def unpack(saved: PlaceHolder | KeptParameter) -> Tensor:
    """Return the tensor that *saved* stands for; autograd's unpack hook."""
    if type(saved) is PlaceHolder:
        return saved.read()
    assert isinstance(saved, KeptParameter)
    if version_of(saved.tensor) != saved.version:
        raise SavedTensorModifiedError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a parameter that layer {saved.layer!r} used was changed before backward. "
            "Run backward before the optimizer steps. (It fails in the same way without hf_pyao.)"
        )
    return saved.tensor


class FilledSegments:
    """The segments that ran again and may hold tensors still."""

    def __init__(self) -> None:
        self._segments: weakref.WeakSet[Segment] = weakref.WeakSet()
        self.num_runs = 0
        """How often a segment ran again."""

    def add(self, segment: Segment) -> None:
        """Take note that *segment* runs again: others need not hold any longer what was used."""
        self.num_runs += 1
        for other in list(self._segments):
            if other is not segment:
                other.forget(is_used_only=True)
        self._segments.add(segment)

    def discard(self, segment: Segment) -> None:
        """Take note that *segment* holds nothing any more."""
        self._segments.discard(segment)


class Segment:
    """Up to so many consecutive layer calls, from their forward to their backward.

    Args:
        first: the engine's call of its first layer.
        hidden: what that layer gets.
        keeper: keeps *hidden*, and what kernels of attention return.
        filled: knows the segments that hold tensors.
        devices: accelerators whose random numbers its layers may draw.
        running: entered while it runs again.
    """

    def __init__(
        self,
        first: LayerCall,
        hidden: Tensor,
        keeper: Keeper,
        filled: FilledSegments,
        devices: Sequence[torch.device],
        running: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self.lock = threading.RLock()  # see [Note: Threads] in runtime/unpacking.py
        self.calls: list[RecordedCall] = []
        self.tape = first.tape
        self._first = self._last = first
        self._keeper = keeper
        self._filled = filled
        self._devices = devices
        self._running = running
        self._hidden: Tensor | None = hidden
        self._hidden_version = version_of(hidden)
        self._requires_grad = hidden.requires_grad
        self._kept_hidden: Callable[[], Tensor | None] = lambda: None
        self._input: Handle | None = None
        self._attention: SeenAttention | None = None
        self._place_holders: list[weakref.ref[PlaceHolder]] = []
        self._metas: list[Meta] = []
        self._made: list[tuple[weakref.ref[Tensor], int, MadeBefore]] = []

    @property
    def name(self) -> str:
        """Its layers, for messages."""
        first, last = self.calls[0].name, self.calls[-1].name
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
        self._last = call
        self._attention = attention
        self.calls.append(recorded)

    def made_by(self, tensor: Tensor, *, last_only: bool = False) -> MadeBefore | None:
        """Return which of its layers returned *tensor*, if one did and it was not changed since."""
        for ref, version, made in reversed(self._made):
            if last_only and made.call != len(self.calls) - 1:
                return None
            if ref() is tensor:
                return made if version == version_of(tensor) else None
        return None

    def pack(self, call: LayerCall, tensor: Tensor) -> PlaceHolder | KeptParameter:
        """Take over *tensor*, which autograd saves in it; its pack hook, but for the first."""
        if isinstance(tensor, Parameter):
            return KeptParameter(tensor, call.fqn)
        if self._hidden is not None:
            self._keep_input(self._hidden)
        if self._attention is not None:
            self._attention.packed(tensor, functools.partial(self._keeper.keep, call))
        place_holder = PlaceHolder(self)
        self._place_holders.append(weakref.ref(place_holder))
        self._metas.append((tensor.shape, tensor.dtype, tensor.device))
        return place_holder

    def _keep_input(self, hidden: Tensor) -> None:
        self._check_hidden(hidden)
        self._hidden = None
        self._kept_hidden = weakref.ref(hidden)
        self._input = self._keeper.keep_input(self._first, hidden)

    def layer_ended(self, outputs: Sequence[Tensor]) -> None:
        """Take note of what the newest of its layers returned.

        Raises:
            SavedTensorModifiedError: the layer changed what it was given, or a buffer for the first
                time.
        """
        self._hidden = None  # if nothing was saved, there is nothing to run again for
        recorded = self.calls[-1]
        if self.has_saved:
            kept = self._kept_hidden() if len(self.calls) == 1 else None
            if kept is not None:
                self._check_hidden(kept)
            if recorded.changed_argument():
                raise _changes_its_input(recorded.name)
            recorded.forward_ended()
            if self._attention is not None:
                recorded.keeps_attention(self._attention.calls)
        self._attention = None
        index = len(self.calls) - 1
        self._made += [
            (weakref.ref(tensor), version_of(tensor), MadeBefore(index, ordinal))
            for ordinal, tensor in enumerate(outputs)
        ]

    def _check_hidden(self, hidden: Tensor) -> None:
        if version_of(hidden) != self._hidden_version:
            raise _changes_its_input(self.calls[-1].name)

    # ---- backward ------------------------------------------------------------------------------

    def run_again(self, task: int) -> None:
        """Run its layers again, and fill the place holders that live, for graph task *task*.

        Raises:
            RecomputationError: they do not save what they saved in forward.
        """
        assert self._input is not None
        self.forget(is_used_only=False)
        self._filled.add(self)
        if task != NO_TASK:
            forget = functools.partial(_forget, weakref.ref(self))
            torch.autograd.Variable._execution_engine.queue_callback(forget)
        try:
            hidden = self._keeper.give(self._input, self._last)
        except SavedTensorModifiedError as error:
            raise SavedTensorModifiedError(
                f"the input of {self.name} was changed in place after it was given, and has to be "
                "given again in backward (checkpoint_every). Clone the tensor before changing it, "
                "or give checkpoint_every=0."
            ) from error
        if self._requires_grad and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()
        collector = _Collector(self, task, self._place_holders, self._metas)
        random_state = RandomState(self._devices)
        with self._running():
            try:
                with torch.enable_grad():
                    self._run_layers(hidden, collector)
            except _AllCollectedError as end:
                if end.collector is not collector:
                    raise
            finally:
                random_state.restore()
        collector.check()

    def _run_layers(self, hidden: Tensor, collector: _Collector) -> None:
        made: list[list[Tensor]] = []
        for recorded in self.calls:
            outputs = recorded.run(
                None if made else hidden,
                made,
                collector.on(recorded.name),
                lambda handle: self._keeper.give(handle, self._last),
                self._keeper.rules,
            )
            made.append(outputs)

    def forget(self, *, is_used_only: bool) -> None:
        """Let go of what its place holders hold, or of what backward got already."""
        holds_more = False
        for ref in self._place_holders:
            place_holder = ref()
            if place_holder is None:
                continue
            if is_used_only and not place_holder.is_used:
                holds_more = True
            else:
                place_holder.clear()
        if not holds_more:
            self._filled.discard(self)


def _forget(ref: weakref.ref[Segment]) -> None:
    """Let go of what a segment still holds at the end of a backward pass."""
    segment = ref()
    if segment is not None:
        segment.forget(is_used_only=False)


class _AllCollectedError(Exception):
    """Ends a second run early: what it would still save is asked for by no one."""

    def __init__(self, collector: _Collector) -> None:
        super().__init__("a segment of layers has run far enough")
        self.collector = collector


class _Collector:
    """Gets what the layers of a segment save as they run again."""

    def __init__(
        self,
        segment: Segment,
        task: int,
        place_holders: Sequence[weakref.ref[PlaceHolder]],
        metas: Sequence[Meta],
    ) -> None:
        self._name = segment.name
        self._task = task
        self._place_holders = place_holders
        self._metas = metas
        living = [index for index, ref in enumerate(place_holders) if ref() is not None]
        self._last = living[-1] if living else -1
        self._num_seen = 0

    @contextlib.contextmanager
    def on(self, layer: str) -> Iterator[None]:
        """Have it get what is saved inside of this context."""
        hooks: Pack = pack_hook(_collect, self, is_second_run=True)
        try:
            push_hooks(hooks, _as_it_is)
            yield
        finally:
            pop_hooks(hooks, layer)

    def collect(self, tensor: Tensor) -> Tensor:
        """Take *tensor* over; return what the second run's own graph is to hold."""
        if isinstance(tensor, Parameter):
            return tensor
        index = self._num_seen
        self._num_seen = index + 1
        held = tensor.detach()
        if index > self._last:
            return held
        meta = (tensor.shape, tensor.dtype, tensor.device)
        if meta != self._metas[index]:
            raise _other_tensors(
                self._name,
                f"tensor {index} that it saves has {_described(meta)}; in forward it had "
                f"{_described(self._metas[index])}",
            )
        place_holder = self._place_holders[index]()
        if place_holder is not None:
            place_holder.fill(held, self._task)
        if index == self._last:
            raise _AllCollectedError(self)
        return held

    def check(self) -> None:
        """Raise if the run has ended before all was saved that was to be."""
        if self._num_seen <= self._last:
            raise _other_tensors(
                self._name,
                f"it saved {self._num_seen} tensors, and in forward at least {self._last + 1}",
            )


def _collect(collector: _Collector, tensor: Tensor) -> Tensor:
    return collector.collect(tensor)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _described(meta: Meta) -> str:
    shape, dtype, device = meta
    return f"shape {tuple(shape)}, {dtype}, on {device}"


def _other_tensors(name: str, what: str) -> RecomputationError:
    return RecomputationError(
        f"{name} ran again in backward (checkpoint_every), and did otherwise than in forward: "
        f"{what}. A layer must do the same each time that it gets the same: what depends on time, "
        "on a counter of its own or on a cache may not. Give checkpoint_every=0 for this model."
    )


def _changes_its_input(layer: str) -> SavedTensorModifiedError:
    return SavedTensorModifiedError(
        f"layer {layer!r} changes what it is given in place, so that it cannot run again in "
        "backward from the same (checkpoint_every). Use the out-of-place form of the operation, "
        "or give checkpoint_every=0."
    )
