"""The backward side: brings saved tensors back in time, and in the right order.

``unpack`` reads: start this layer call's backward, reload, wait, decode, return.

[Note: Threads]
Autograd runs one thread for each device, so that a model spread over several devices in one process
may unpack on two threads at once. A lock makes each unpack, and the start and end of a backward,
one step. Destructors take no lock: see [Note: Buffer lifetime] in ``stores.host_pool``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from hf_pyao.engine.runtime.backward_order import BackwardOrder, calls_after
from hf_pyao.engine.runtime.saved_tensor import (
    FlattenedTensor,
    Handle,
    KeptTensor,
    SavedStorage,
    SavedTensor,
)
from hf_pyao.engine.runtime.streamed_weights import StreamedTensor, StreamedWeights
from hf_pyao.engine.runtime.tape import LayerCall, Tape
from hf_pyao.engine.torch_hooks.compile_guard import uncompiled
from hf_pyao.engine.transfer.compute_streams import lend, visitor_of
from hf_pyao.engine.transfer.graph_task import NO_TASK, current_graph_task
from hf_pyao.engine.transfer.layout import TensorLayout
from hf_pyao.engine.transfer.mover import HERE, OFFLOADING, Group, MovedBytes, Mover
from hf_pyao.engine.transfer.profiler_ranges import named_range

if TYPE_CHECKING:
    from hf_pyao.engine.recompute.replay import DroppedStorage


class Unpacker:
    """Gives saved tensors back to autograd.

    Args:
        mover: moves bytes.
        order: says which forward's backward follows.
        waiting: returns the tapes that may still have a backward, oldest first.
        on_tapes_done: called at the end of each backward pass with its tapes.
    """

    def __init__(
        self,
        *,
        mover: Mover,
        order: BackwardOrder,
        waiting: Callable[[], Sequence[Tape]],
        on_tapes_done: Callable[[Sequence[Tape]], None],
    ) -> None:
        self.weights: StreamedWeights | None = None
        """Weights that are streamed; None: all are on the device."""
        self._mover = mover
        self._order = order
        self._waiting = waiting
        self._on_tapes_done = on_tapes_done
        self._lock = threading.RLock()  # see [Note: Threads]
        self._tapes: list[Tape] = []
        self._task = NO_TASK
        self.newest_task = NO_TASK
        """Id of the newest graph task that came to a layer."""
        self._running_call: LayerCall | None = None

    @property
    def running_tapes(self) -> Sequence[Tape]:
        """The forwards through which backward runs, or ran when it failed."""
        return self._tapes

    @property
    def running_call(self) -> LayerCall | None:
        """The layer call whose backward runs, or was the last to run in one that failed."""
        return self._running_call

    def unpack(self, handle: Handle) -> torch.Tensor:
        """Return the tensor that *handle* stands for, ready for compute on the current stream."""
        call = handle.call
        task = current_graph_task()
        if call.backward_task != task and task != NO_TASK:
            self.backward_start(call)
        if type(handle) is KeptTensor:
            if handle.tensor._version != handle.version:
                handle.check_unmodified()
            return handle.tensor
        if type(handle) is not SavedTensor:
            if type(handle) is FlattenedTensor:
                return handle.give(self.unpack)
            assert type(handle) is StreamedTensor
            return handle.give()
        home = handle.storage.home
        visitor = None if home is None else visitor_of(home)
        with self._lock:
            if home is None or visitor is None:
                return self._unpack(handle)
            with home:
                tensor = self._unpack(handle)
            return lend(tensor, home, visitor)

    def _unpack(self, handle: SavedTensor) -> torch.Tensor:
        record, layout, mover = handle.storage, handle.layout, self._mover
        record.check_unmodified()
        if type(record) is not SavedStorage:
            return self._rebuild(record, layout)
        phase = record.phase
        if phase is OFFLOADING and self._task == NO_TASK:  # looked at outside a backward pass
            tensor = layout.view_of(*mover.read_payload(record))
            mover.forget_decoded(record)
            return tensor
        known = None if record.handed_out is None else record.handed_out_as(layout)
        if phase is OFFLOADING:
            if known is None:
                known = record.hand_out(layout.view_of(*mover.read_payload(record)), layout)
            if not mover.is_exhausted:
                mover.prefetch()
            return known
        if phase is not HERE:
            mover.bring_here(record)
        if known is not None:
            tensor = known
        else:
            tensor = record.hand_out(record.tensor_on_device(layout), layout)
        if record.item in mover.ahead:
            mover.note_use(record.item)
            if not mover.is_exhausted:
                mover.prefetch()
        if self._task == NO_TASK:
            record.drop_device_copy()  # looked at outside a backward pass
        return tensor

    def _rebuild(self, record: DroppedStorage, layout: TensorLayout) -> torch.Tensor:
        """Replay what leads to a storage that was dropped."""
        storage = record.rebuild()
        tensor = record.handed_out_as(layout)
        if tensor is None:
            tensor = record.hand_out(layout.view_of(storage, 0), layout)
        if current_graph_task() == NO_TASK:
            record.forget_rebuilt()  # looked at outside a backward pass
        else:
            self._mover.prefetch()
        return tensor

    # ---- backward begins and ends --------------------------------------------------------------

    def backward_start(self, call: LayerCall) -> None:
        """Begin the backward of *call*: its own storages first, then those needed next.

        Called at each unpack of the call and when a gradient reaches its outputs; only the first
        of these in a graph task counts.
        """
        task = current_graph_task()
        if task == NO_TASK or call.backward_task == task:
            return
        with self._lock:
            if self._task != task:
                self.finalize_backward()  # of one that failed, or that this one runs inside of
                self._task = self.newest_task = task
                finalize = self.finalize_backward
                torch.autograd.Variable._execution_engine.queue_callback(
                    uncompiled(finalize) if call.is_compiled else finalize
                )
            call.start_backward(task)
            if call.tape not in self._tapes:
                self._tapes.append(call.tape)
            if self._running_call is not None:
                self._backward_end(self._running_call)
            self._running_call = call
            self._mover.look_for_watchers()
            if self._mover.observer is not None:
                self._mover.observer.on_module(call.fqn, "", "backward", is_start=True)
            with named_range("backward_start", call.fqn):
                following = calls_after(call, self._order, self._waiting())
                others: Iterator[Group] = (reversed(each.records) for each in following)
                weights = self.weights
                if weights is not None:
                    weights.begin_backward(call.layer.index)
                    others = _behind_upload(weights, others)
                # Backward asks for what was saved last first.
                self._mover.start_backward(reversed(call.records), others)
                if weights is not None and not self._mover.window.limit_bytes:
                    weights.upload_ahead()  # no group is asked for with a window of nothing

    def _backward_end(self, call: LayerCall) -> None:
        """End the backward of *call*: what a retained graph still holds leaves the device again."""
        if self._mover.observer is not None:
            self._mover.observer.on_module(call.fqn, "", "backward", is_start=False)
        for record in call.live_records():
            if record.phase is HERE:
                record.drop_device_copy()
        if call.recomputation is not None:
            call.recomputation.reset()

    def finalize_backward(self) -> None:
        """End a backward pass: no device copy of a saved tensor of its forwards outlives it.

        It may have run through several forwards, and need not have come to its end. Those that
        still wait for their backward keep what is on its way.
        """
        with self._lock:
            tapes, self._tapes = self._tapes, []
            self._task = NO_TASK
            running, self._running_call = self._running_call, None
            if running is not None and self._mover.observer is not None:
                self._mover.observer.on_module(running.fqn, "", "backward", is_start=False)
            for tape in tapes:
                for record in tape.live_records():
                    record.drop_device_copy()
                for recomputation in tape.live_recomputations():
                    recomputation.reset()
            others = [tape for tape in self._waiting() if tape not in tapes]
            self._mover.reset(_items_of(others))
            if others:
                over = {id(tape.stats) for tape in tapes}
                self._mover.link.drain(lambda moved: id(moved.meter) in over)
            else:
                self._mover.link.drain(self._is_own)
        if tapes:
            self._order.note_backward(tapes)
            self._on_tapes_done(tapes)

    def _is_own(self, moved: MovedBytes) -> bool:
        return moved.mover is self._mover


def _behind_upload(weights: StreamedWeights, groups: Iterator[Group]) -> Iterator[Group]:
    """Yield *groups*, before each of which the weights that are used next are uploaded.

    The first group is asked for as the last reload of the layer that runs is queued: weights and
    reloads share the lane in the order in which backward needs them.
    """
    for group in groups:
        weights.upload_ahead()
        yield group
    weights.upload_ahead()


def _items_of(tapes: Sequence[Tape]) -> list[int]:
    """Return the ids of what *tapes* moved, see
    :class:`~hf_pyao.engine.transfer.schedule.Schedule`."""
    return [record.item for tape in tapes for record in tape.live_records()]
