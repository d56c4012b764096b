"""The backward side: brings saved tensors back in time, and in the right order.

``unpack`` reads: start this layer call's backward, reload, wait, decode, return.

[Note: Threads]
Autograd runs one thread for each device, so that a model spread over several devices in one process
may unpack on two threads at once. A lock makes each unpack, and the start and end of a backward,
one step. Destructors take no lock: see [Note: Buffer lifetime] in ``stores.host_pool``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hf_pyao.errors import ReleasedTensorError
from hf_pyao.runtime.compiled import uncompiled
from hf_pyao.runtime.ranges import in_range, is_profiling, named_range
from hf_pyao.runtime.recompute import RecomputedStorage
from hf_pyao.runtime.saved_tensor import (
    DEVICE,
    HOST,
    OFFLOADING,
    RELOADING,
    KeptTensor,
    SavedStorage,
    SavedTensor,
)
from hf_pyao.runtime.tape import LayerCall, Tape
from hf_pyao.runtime.transport import Transport
from hf_pyao.runtime.window import OffloadWindow, ReloadWindow

if TYPE_CHECKING:
    from hf_pyao.runtime.recomputer import Recomputer

NO_TASK = -1
"""Id of the graph task outside of a backward pass."""

_current_task: Callable[[], int] = torch._C._current_graph_task_id


class Unpacker:
    """Gives saved tensors back to autograd.

    Args:
        transport: copies bytes.
        offloads: device copies that still wait to leave.
        reloads: storages on their way back.
        meets_at_layer_end: wait for all of a layer's reloads before its backward, as the paper.
        on_tape_done: called with each tape whose storages are all released.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        offloads: OffloadWindow,
        reloads: ReloadWindow,
        meets_at_layer_end: bool,
        on_tape_done: Callable[[Tape], None],
    ) -> None:
        self.recomputer: Recomputer | None = None
        self._transport = transport
        self._offloads = offloads
        self._reloads = reloads
        self._meets_at_layer_end = meets_at_layer_end
        self._on_tape_done = on_tape_done
        self._lock = threading.RLock()  # see [Note: Threads]
        self._tapes: list[Tape] = []
        self._task = NO_TASK
        self._running_call: LayerCall | None = None

    def unpack(self, handle: KeptTensor | SavedTensor) -> torch.Tensor:
        """Return the tensor that *handle* stands for, ready for compute on the current stream."""
        call = handle.call
        task = _current_task()
        if call.backward_task != task and task != NO_TASK:
            self.backward_start(call)
        if type(handle) is KeptTensor:
            if handle.tensor._version != handle.version:
                handle.check_unmodified()
            return handle.tensor
        home = handle.storage.home
        visitor = None if home is None else home.visitor()
        with self._lock:
            if visitor is None:
                return self._unpack(handle)
            assert home is not None
            with home.stream:
                tensor = self._unpack(handle)
            home.receive(visitor)
            return tensor

    def _unpack(self, handle: SavedTensor) -> torch.Tensor:
        record = handle.storage
        record.check_unmodified()
        if not isinstance(record, SavedStorage):
            assert isinstance(record, RecomputedStorage)
            return self._rebuild(handle, record)
        residency = record.residency
        if residency is OFFLOADING:
            tensor = handle.layout.view_of(*record.payload_storage())
            return tensor if self._task == NO_TASK else record.hand_out(tensor, handle)
        if residency is HOST:
            self._reload(record)
        if residency is not DEVICE:
            self._wait(record)
        known = record.handed_out_like(handle)
        if known is not None:
            tensor = known
        else:
            tensor = record.hand_out(record.tensor_on_device(handle), handle)
        if not record.is_consumed:
            self._reloads.consumed(record)
            if not self._reloads.is_exhausted or self._offloads.waiting_bytes:
                self._prefetch()
        if self._task == NO_TASK:
            self._drop_device_copy(record)  # looked at outside a backward pass
        return tensor

    def load(self, record: SavedStorage) -> tuple[torch.UntypedStorage, int]:
        """Return the bytes of *record* on the device, and which byte of the original is first."""
        home = record.home
        visitor = None if home is None else home.visitor()
        if visitor is None:
            return self._load(record)
        assert home is not None
        with home.stream:
            loaded = self._load(record)
        home.receive(visitor)
        return loaded

    def _load(self, record: SavedStorage) -> tuple[torch.UntypedStorage, int]:
        if record.residency is OFFLOADING:
            return record.payload_storage()
        if record.residency is HOST:
            self._reload(record)
        self._wait(record)
        storage = record.device_storage()
        self._reloads.consumed(record)
        return storage, record.decoded_start

    def backward_start(self, call: LayerCall) -> None:
        """Begin the backward of *call*: its own storages first, then those needed next.

        Called at each unpack of the call and when a gradient reaches its outputs; only the first
        of these in a graph task counts.
        """
        task = _current_task()
        if task == NO_TASK or call.backward_task == task:
            return
        with self._lock:
            call.backward_task = task
            call.tape.has_run_backward = True
            if self._task != task:
                self.finalize_backward()  # of one that failed, or that this one runs inside of
                self._task = task
                finalize = self.finalize_backward
                torch.autograd.Variable._execution_engine.queue_callback(
                    uncompiled(finalize) if call.is_compiled else finalize
                )
            if call.tape not in self._tapes:
                self._tapes.append(call.tape)
            if self._running_call is not None:
                self._backward_end(self._running_call)
            self._running_call = call
            if self._meets_at_layer_end:
                for record in call.live_records():
                    self._wait(record)
            with named_range("backward_start", call.fqn):
                self._reloads.start(call)
                self._prefetch()

    def finalize_backward(self) -> None:
        """End a backward pass: no device copy of a saved tensor outlives it.

        It may have run through several micro-batches, and need not have come to its end.
        """
        with self._lock:
            tapes, self._tapes = self._tapes, []
            self._task = NO_TASK
            self._running_call = None
            for tape in tapes:
                for record in tape.live_records():
                    self._drop_device_copy(record)
                for replay in tape.live_replays():
                    replay.reset()
            self._reloads.reset()
            self._offloads.drain()
        for tape in tapes:
            if not tape.has_live_records():
                self._on_tape_done(tape)

    def _rebuild(self, handle: SavedTensor, record: RecomputedStorage) -> torch.Tensor:
        """Replay what leads to a storage that was dropped."""
        assert self.recomputer is not None
        storage = self.recomputer.rebuild(record)
        known = record.handed_out_like(handle)
        tensor = known if known is not None else handle.layout.view_of(storage, 0)
        if known is None:
            record.hand_out(tensor, handle)
        if _current_task() == NO_TASK:
            assert record.call.replay is not None
            record.call.replay.reset()  # looked at outside a backward pass
            for source in self.recomputer.sources(record):
                self._drop_device_copy(source)
        else:
            self._prefetch()
        return tensor

    def _backward_end(self, call: LayerCall) -> None:
        """End the backward of *call*: what a retained graph still holds leaves the device again."""
        for record in call.live_records():
            if record.residency is DEVICE:
                self._drop_device_copy(record)
        if call.replay is not None:
            call.replay.reset()

    def _prefetch(self) -> None:
        self._offloads.release_done()
        while (record := self._reloads.next_record(self._offloads.waiting_bytes)) is not None:
            self._reload(record)

    def _reload(self, record: SavedStorage) -> None:
        """Queue the copy of a storage back to the device, into memory of its home's."""
        home = record.home
        if home is None or home.visitor() is None:
            self._queue_reload(record)
        else:
            with home.stream:
                self._queue_reload(record)

    def _queue_reload(self, record: SavedStorage) -> None:
        host = record.host
        if host is None:
            raise ReleasedTensorError(
                f"{record.slot}: its buffers were given back while a graph still held it. Run "
                "backward before detaching the offloader."
            )
        source = record.host_view
        if source is None:
            source = host.data
        record.buffer = buffer = _device_buffer(record)
        record.to(RELOADING)
        reload = self._transport.reload
        if is_profiling():
            reload = in_range(reload, "reload", record.slot.layer)
        record.reload_ticket = reload(
            source, buffer, after=(record.offload_ticket,), label=record.slot
        )
        self._reloads.loaded(record)
        stats = record.call.tape.stats
        stats.reloaded_bytes += record.nbytes
        stats.link_bytes += record.device_bytes

    def _wait(self, record: SavedStorage) -> None:
        """Order the home of *record* behind its reload, if one is under way."""
        if record.residency is RELOADING:
            self._transport.wait(record.reload_ticket)
            record.to(DEVICE)

    def _drop_device_copy(self, record: SavedStorage) -> None:
        """Let go of the reloaded copy; the host still has the bytes."""
        if record.residency is RELOADING:
            self._transport.retire(record.reload_ticket)
        elif record.residency is not DEVICE:
            return
        self._reloads.consumed(record)
        if record.home is not None:
            record.home.await_visitors()
        record.drop_device_copy()
        record.to(HOST)


def _device_buffer(record: SavedStorage) -> torch.Tensor:
    """Allocate what the payload of *record* is brought back to, on the current stream."""
    if record.host_view is None:
        return torch.empty(record.device_bytes, dtype=torch.uint8, device=record.device)
    layout = record.layout
    return layout.blank.new_empty_strided(layout.size, layout.stride)
