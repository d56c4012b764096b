"""The engine: what happens to each saved tensor between pack and unpack.

``pack`` reads: look whether it can move, whether it was seen, decide, encode, offload, record.
``unpack`` reads: start this layer call's backward, reload, wait, decode, return.
The engine knows layers by number and name only; module hooks (``lifecycle``) drive it.

[Note: In-place changes]
Hooks switch off autograd's version check. A kept tensor is compared with its version at unpack. For
an offloaded one a ``VersionWatch`` outlives the device copy, so that a change at any time before
unpack raises as it would without hooks, and does not depend on how far the copy had come.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from hf_pyao.codecs import Codec, Encoded
from hf_pyao.errors import ReleasedTensorError
from hf_pyao.metrics import MicroBatchStats, RunTotals
from hf_pyao.runtime.compiled import uncompiled
from hf_pyao.runtime.layout import (
    SUBCLASS,
    PartPlace,
    byte_offset,
    bytes_view,
    is_row_statistic,
    nbytes_of,
    part_targets,
    place_parts,
    range_to_move,
    reason_not_movable,
    rows_view,
)
from hf_pyao.runtime.parameters import FrozenShapes, is_parameter
from hf_pyao.runtime.policy import (
    Candidate,
    Decision,
    Keep,
    Offload,
    Policy,
    Recompute,
    RecomputingPolicy,
)
from hf_pyao.runtime.ranges import named_range
from hf_pyao.runtime.recompute import RecomputedStorage
from hf_pyao.runtime.recomputer import Recomputer
from hf_pyao.runtime.saved_tensor import (
    KeptTensor,
    Residency,
    SavedStorage,
    SavedTensor,
    VersionWatch,
)
from hf_pyao.runtime.tape import Layer, LayerCall, Tape
from hf_pyao.runtime.transport import Transport
from hf_pyao.runtime.window import OffloadWindow, Payload, ReloadWindow
from hf_pyao.stores import HostPool

logger = logging.getLogger(__name__)

LAST_LAYER = "last layer"
SHARED = "shared by layers"
ELSEWHERE = "not on the device"
HOST_FULL = "host memory full"
EMPTY = "empty"


class OffloadEngine:
    """Moves the saved tensors of layer calls to the host and back.

    Args:
        policy: decides per distinct saved storage.
        codec: how offloaded storages are written, unless the decision names another.
        transport: copies bytes.
        pool: host memory.
        window_bytes: bound on bytes in flight in each direction; None is the paper's rule, to meet
            at the end of each layer.
        buffer_keys: returns the storage keys of the model's buffers, which never move.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        codec: Codec,
        transport: Transport,
        pool: HostPool,
        window_bytes: int | None,
        buffer_keys: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        self.policy = policy
        self.codec = codec
        self.transport = transport
        self.pool = pool
        self.totals = RunTotals()
        self.last_stats: MicroBatchStats | None = None
        self.recomputer: Recomputer | None = None
        if isinstance(policy, RecomputingPolicy):
            self.recomputer = Recomputer(policy, store=self._store, load=self._load)
        self.num_layer_calls = 0
        self._num_packs_before = 0
        self._has_warned_idle = False
        self._meets_at_layer_end = window_bytes is None
        self._offloads = OffloadWindow(transport, window_bytes)
        self._reloads = ReloadWindow(window_bytes)
        self._find_buffer_keys = buffer_keys
        self._buffer_keys: frozenset[int] = frozenset()
        self._tape: Tape | None = None
        self._tapes_in_backward: list[Tape] = []
        self._task = -1
        self._running_call: LayerCall | None = None
        self._empties: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    # ---- forward -------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Note that the model's stack of layers starts a forward.

        It belongs to the micro-batch under way if an earlier forward still waits for its backward
        (two forwards before one backward); otherwise the next tape opens.
        """
        tape = self._tape
        if tape is None or not tape.accepts_forward or not tape.has_live_records():
            self.end_micro_batch()
            self._tape = Tape()
            self._buffer_keys = self._find_buffer_keys()

    def forward_start(
        self,
        layer: Layer,
        *,
        is_kept: bool = False,
        shared: Sequence[torch.Tensor] = (),
        frozen_shapes: FrozenShapes | None = None,
        reason_not_traceable: Callable[[], str | None] = lambda: None,
    ) -> LayerCall:
        """Open a call of *layer*; what autograd saves from here on is the engine's.

        Args:
            layer: the layer that runs now.
            is_kept: keep what it saves, since backward begins with it.
            shared: tensors among its inputs that other layers get too.
            frozen_shapes: see :func:`~hf_pyao.runtime.parameters.is_parameter`.
            reason_not_traceable: asked where something is to be recomputed: says why the layer's
                operations cannot be seen, or returns None.
        """
        tape = self._tape
        if tape is None or not tape.accepts_forward or tape.starts_over(layer):
            self.begin_forward()
            tape = self._tape
        assert tape is not None
        self.num_layer_calls += 1
        call = tape.open_call(layer, is_kept)
        if frozen_shapes is not None:
            call.frozen_shapes = frozen_shapes
        if shared:
            call.shared_keys = frozenset(
                tensor.untyped_storage()._cdata
                for tensor in shared
                if reason_not_movable(tensor) is None
            )
        if self.recomputer is not None and not is_kept:
            self.recomputer.open(call, reason_not_traceable, self._buffer_keys)
        return call

    def forward_end(self, call: LayerCall, outputs: Sequence[torch.Tensor]) -> None:
        """Close *call*; its backward starts when a gradient reaches one of *outputs*."""
        self._close(call)
        with named_range("layer_end", call.fqn):
            self._offloads.layer_end()

        def on_gradient(_: tuple[torch.Tensor | None, ...]) -> None:
            self.backward_start(call)

        if call.is_compiled:
            on_gradient = uncompiled(on_gradient)
        for output in outputs:
            # The node and not the tensor, which is the user's: it would warn when it is saved.
            if output.grad_fn is not None:
                output.grad_fn.register_prehook(on_gradient)

    def abort(self, call: LayerCall) -> None:
        """Close *call*, whose forward failed. What it saved goes as its graph goes."""
        self._close(call)
        call.tape.is_failed = True
        self._offloads.drain()

    def _close(self, call: LayerCall) -> None:
        call.is_open = False
        if self.recomputer is not None:
            self.recomputer.close(call)

    # ---- pack ----------------------------------------------------------------------------------

    def pack(self, call: LayerCall, tensor: torch.Tensor) -> KeptTensor | SavedTensor:
        """Take over *tensor*, which autograd saves in *call*; return what stands for it."""
        trace = call.trace
        if trace is None:
            return self._pack(call, tensor)
        trace.is_paused = True  # what follows is no part of the layer
        try:
            return self._pack(call, tensor)
        finally:
            trace.is_paused = False

    def _pack(self, call: LayerCall, tensor: torch.Tensor) -> KeptTensor | SavedTensor:
        stats = call.tape.stats
        stats.num_packs += 1
        reason = reason_not_movable(tensor)
        if reason is not None:
            return self._keep_unmovable(call, tensor, reason)
        if is_parameter(tensor, call.frozen_shapes):
            # The object itself: ZeRO-3 exchanges the data of a Parameter behind our back, and a
            # detached copy would pin what it gathered. No node saves a parameter as its own
            # output, so holding it makes no cycle.
            return KeptTensor(tensor, tensor._version, call, call.paths[-1], -1)
        storage = tensor.untyped_storage()
        if storage._cdata in self._buffer_keys:
            return KeptTensor(tensor.detach(), tensor._version, call, call.paths[-1], -1)
        if not self.codec.is_lossless:
            call.saved_shapes.add(tuple(tensor.shape))
        entries = call.tape.table.entries(storage)
        if entries is None:
            entries = call.tape.table.add(storage)
            stats.would_hold_bytes += storage.nbytes()
        elif (known := self._find(call, tensor, entries)) is not None:
            if storage._cdata in call.anchor_keys:
                call.anchor_keys.remove(storage._cdata)
                stats.would_hold_bytes += storage.nbytes()
            return known
        return self._place(call, tensor, storage, entries)

    def _keep_unmovable(self, call: LayerCall, tensor: torch.Tensor, reason: str) -> KeptTensor:
        is_parameter_subclass = reason == SUBCLASS and isinstance(tensor, Parameter)
        if is_parameter_subclass:
            return KeptTensor(tensor, tensor._version, call, call.paths[-1], -1)
        nbytes = nbytes_of(tensor) if tensor.layout is torch.strided else 0
        call.tape.stats.would_hold_bytes += nbytes
        call.tape.stats.kept_bytes[reason] += nbytes
        return KeptTensor(tensor.detach(), tensor._version, call, call.paths[-1], -1)

    def _find(
        self, call: LayerCall, tensor: torch.Tensor, entries: list[object]
    ) -> KeptTensor | SavedTensor | None:
        """Return a handle on what *tensor*'s storage became when it was saved before."""
        version = tensor._version
        for entry in entries:
            if isinstance(entry, _KeptSlot):
                return KeptTensor(tensor.detach(), version, call, entry.path, entry.ordinal)
            assert isinstance(entry, weakref.ref)
            record = entry()
            if record is not None and record.covers(tensor, version):
                if tensor._cdata != record.impl:
                    # Another tensor on the same storage may have a version counter of its own.
                    record.watches.append(self._watch(tensor))
                return SavedTensor(record, tensor, call)
        return None

    def _place(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        entries: list[object],
    ) -> KeptTensor | SavedTensor:
        """Decide on a storage that is new to the tape, and act on it."""
        path = call.paths[-1]
        ordinal = call.ordinals[path]
        call.ordinals[path] = ordinal + 1
        call.tape.stats.num_slots += 1
        decision = self._decide(call, tensor, storage, path, ordinal)
        if isinstance(decision, Recompute):
            assert self.recomputer is not None
            dropped = self.recomputer.drop(call, tensor, storage, path, ordinal)
            if dropped is not None:
                dropped.watches.append(self._watch(tensor))
                entries.append(weakref.ref(dropped))
                return SavedTensor(dropped, tensor, call)
            decision = decision.otherwise
        return self._move_or_keep(call, tensor, storage, entries, path, ordinal, decision)

    def _decide(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        path: str,
        ordinal: int,
    ) -> Decision:
        reason = self._reason_to_keep(call, tensor, storage)
        if reason is not None:
            return Keep(reason)
        producer = None
        if self.recomputer is not None:
            producer = self.recomputer.producer_of(call, storage)
        layer = call.layer
        nbytes = storage.nbytes()
        return self.policy.decide(
            Candidate(layer.fqn, layer.index, path, ordinal, nbytes, tensor.dtype, producer)
        )

    def _move_or_keep(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        entries: list[object],
        path: str,
        ordinal: int,
        decision: Keep | Offload,
    ) -> KeptTensor | SavedTensor:
        """Store *tensor*'s storage where *decision* says."""
        nbytes = storage.nbytes()
        handle: KeptTensor | SavedTensor
        if isinstance(decision, Offload):
            codec = decision.codec or self.codec
            record = self._offload(call, tensor, storage, nbytes, ordinal, codec)
            if record is not None:
                entries.append(weakref.ref(record))
                handle = SavedTensor(record, tensor, call)
                if self.recomputer is not None:
                    self.recomputer.note_stored(call, storage, tensor, handle)
                return handle
            decision = Keep(HOST_FULL)
        call.tape.stats.kept_bytes[decision.reason] += nbytes
        entries.append(_KeptSlot(path, ordinal))
        handle = KeptTensor(tensor.detach(), tensor._version, call, path, ordinal)
        if self.recomputer is not None:
            self.recomputer.note_stored(call, storage, tensor, handle)
        return handle

    def _store(self, call: LayerCall, tensor: torch.Tensor) -> KeptTensor | SavedTensor:
        """Store *tensor*, which autograd did not save, to rebuild others from it."""
        storage = tensor.untyped_storage()
        entries = call.tape.table.entries(storage)
        if entries is None:
            entries = call.tape.table.add(storage)
            call.anchor_keys.add(storage._cdata)
        else:
            known = self._find(call, tensor, entries)
            if known is not None and _is_whole(known):
                return known
        path = call.paths[-1]
        decision = self._decide(call, tensor, storage, path, -1)
        if isinstance(decision, Recompute):
            decision = decision.otherwise
        return self._move_or_keep(call, tensor, storage, entries, path, -1, decision)

    def _reason_to_keep(
        self, call: LayerCall, tensor: torch.Tensor, storage: torch.UntypedStorage
    ) -> str | None:
        if call.shared_keys and storage._cdata in call.shared_keys:
            return SHARED
        if not tensor.numel() or not storage.nbytes():
            return EMPTY
        if not self.transport.handles(tensor.device):
            return ELSEWHERE
        return LAST_LAYER if call.is_kept else None

    def _offload(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        storage_nbytes: int,
        ordinal: int,
        codec: Codec,
    ) -> SavedStorage | None:
        """Queue the copy of *tensor*'s storage to the host; None if the host has no room."""
        start, end = range_to_move(tensor, storage_nbytes)
        encoded = None
        if not codec.is_lossless or codec.name != "identity":
            encoded = self._encode(call, tensor, storage, start, end, codec)
        if encoded is None:
            payload: Payload = (bytes_view(storage, tensor.device, start, end),)
            places: tuple[PartPlace, ...] = ()
            nbytes = end - start
        else:
            payload = encoded.payload
            places, nbytes = place_parts(payload)
        host = self.pool.acquire(nbytes)
        if host is None:
            return None
        path = call.paths[-1]
        record = SavedStorage(call, path, ordinal, start, end, tensor, host, self._release)
        record.watches.append(self._watch(tensor))
        record.payload = payload
        if encoded is None:
            sources: Payload = payload
            targets: Payload = (host.data,)
        else:
            record.codec, record.spec, record.parts = codec, encoded.spec, places
            sources = tuple(part.contiguous().view(-1).view(torch.uint8) for part in payload)
            targets = part_targets(host.data, places)
        for source, target in zip(sources, targets, strict=True):
            with named_range("offload", call.fqn):
                record.offload_ticket = self.transport.offload(
                    source, target, after=self.pool.barriers, label=record.label
                )
        stats = call.tape.stats
        stats.offloaded_bytes += end - start
        stats.link_bytes += nbytes
        call.records.append(weakref.ref(record))
        self._offloads.add(record, nbytes)
        return record

    def _encode(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        start: int,
        end: int,
        codec: Codec,
    ) -> Encoded | None:
        """Encode a storage's bytes; None if they must cross the link as they are."""
        if not codec.is_lossless and is_row_statistic(tensor, call.saved_shapes):
            return None
        rows = rows_view(tensor, storage, start, end)
        if rows is None or not codec.accepts(tensor) or not codec.accepts(rows):
            return None
        return codec.encode(rows)

    # ---- backward ------------------------------------------------------------------------------

    def unpack(self, handle: KeptTensor | SavedTensor) -> torch.Tensor:
        """Return the tensor that *handle* stands for, ready for compute on the current stream."""
        if isinstance(handle, KeptTensor):
            self.backward_start(handle.call)
            handle.check_unmodified()
            return handle.tensor
        record = handle.storage
        self.backward_start(handle.call)
        record.check_unmodified()
        if isinstance(record, RecomputedStorage):
            return self._rebuild(handle, record)
        if record.residency is Residency.OFFLOADING:
            return self._from_payload(handle, record)
        if record.residency is Residency.HOST:
            self._reload(record)
        self._wait(record)
        tensor = handle.view_of(record.device_storage(), record.decoded_start)
        if not record.is_consumed:
            self._reloads.consumed(record)
            self._prefetch()
        if self._task == -1:
            self._drop_device_copy(record)  # looked at outside a backward pass
        return tensor

    def _rebuild(self, handle: SavedTensor, record: RecomputedStorage) -> torch.Tensor:
        """Replay what leads to a storage that was dropped."""
        assert self.recomputer is not None
        tensor = handle.view_of(self.recomputer.rebuild(record), 0)
        if torch._C._current_graph_task_id() == -1:
            assert record.call.replay is not None
            record.call.replay.reset()  # looked at outside a backward pass
            for source in self.recomputer.sources(record):
                self._drop_device_copy(source)
        else:
            self._prefetch()
        return tensor

    def _load(self, record: SavedStorage) -> tuple[torch.UntypedStorage, int]:
        """Return the bytes of *record* on the device, and which byte of the original is first."""
        if record.residency is Residency.OFFLOADING:
            if record.codec is None:
                return record.payload[0].untyped_storage(), 0
            decoded = record.codec.decode(record.payload, record.spec)
            return decoded.untyped_storage(), record.start - byte_offset(decoded)
        if record.residency is Residency.HOST:
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
        task = torch._C._current_graph_task_id()
        if task == -1 or call.backward_task == task:
            return
        call.backward_task = task
        call.tape.has_run_backward = True
        if self._task != task:
            self.finalize_backward()  # of one that failed, or that this one runs inside of
            self._task = task
            finalize = self.finalize_backward
            torch.autograd.Variable._execution_engine.queue_callback(
                uncompiled(finalize) if call.is_compiled else finalize
            )
        if call.tape not in self._tapes_in_backward:
            self._tapes_in_backward.append(call.tape)
        if self._running_call is not None:
            self.backward_end(self._running_call)
        self._running_call = call
        if self._meets_at_layer_end:
            for record in call.live_records():
                self._wait(record)
        with named_range("backward_start", call.fqn):
            self._reloads.start(call)
            self._prefetch()

    def backward_end(self, call: LayerCall) -> None:
        """End the backward of *call*: what a retained graph still holds leaves the device again."""
        for record in call.live_records():
            if record.residency is Residency.DEVICE:
                self._drop_device_copy(record)
        if call.replay is not None:
            call.replay.reset()

    def finalize_backward(self) -> None:
        """End a backward pass: no device copy of a saved tensor outlives it.

        It may have run through several micro-batches, and need not have come to its end.
        """
        tapes, self._tapes_in_backward = self._tapes_in_backward, []
        self._task = -1
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
                self._publish(tape)

    def _prefetch(self) -> None:
        self._offloads.release_done()
        while (record := self._reloads.next_record(self._offloads.waiting_bytes)) is not None:
            self._reload(record)

    def _reload(self, record: SavedStorage) -> None:
        """Queue the copy of a storage back to the device, into memory of the compute stream."""
        if record.host is None:
            raise ReleasedTensorError(
                f"{record.label}: its buffers were given back while a graph still held it. Run "
                "backward before detaching the offloader."
            )
        buffer = torch.empty(record.host.data.numel(), dtype=torch.uint8, device=record.device)
        record.to(Residency.RELOADING)
        record.buffer = buffer
        record.device_bytes = buffer.numel()
        with named_range("reload", record.call.fqn):
            record.reload_ticket = self.transport.reload(
                record.host.data, buffer, after=(record.offload_ticket,), label=record.label
            )
        self._reloads.loaded(record)
        stats = record.call.tape.stats
        stats.reloaded_bytes += record.nbytes
        stats.link_bytes += record.device_bytes

    def _wait(self, record: SavedStorage) -> None:
        """Order compute behind the reload of *record*, if one is under way."""
        if record.residency is Residency.RELOADING:
            self.transport.wait(record.reload_ticket)
            record.to(Residency.DEVICE)

    def _from_payload(self, handle: SavedTensor, record: SavedStorage) -> torch.Tensor:
        """Read the device copy, which has not been let go yet."""
        if record.codec is None:
            return handle.view_of(record.payload[0].untyped_storage(), 0)
        decoded = record.codec.decode(record.payload, record.spec)
        return handle.view_of(decoded.untyped_storage(), record.start - byte_offset(decoded))

    def _drop_device_copy(self, record: SavedStorage) -> None:
        """Let go of the reloaded copy; the host still has the bytes."""
        if record.residency is Residency.RELOADING:
            self.transport.retire(record.reload_ticket)
        elif record.residency is not Residency.DEVICE:
            return
        self._reloads.consumed(record)
        record.drop_device_copy()
        record.to(Residency.HOST)

    # ---- ends ----------------------------------------------------------------------------------

    def end_micro_batch(self) -> None:
        """Close the tape, whatever its state: after a failure, or before the next one opens."""
        tape, self._tape = self._tape, None
        self.finalize_backward()
        if tape is not None:
            self._num_packs_before += tape.stats.num_packs
            tape.close()
            if tape.has_run_backward:
                self._publish(tape)

    @property
    def num_packs(self) -> int:
        """Calls of the pack hook so far, in all micro-batches."""
        return self._num_packs_before + (self._tape.stats.num_packs if self._tape else 0)

    def warn_idle(self) -> None:
        """Warn, once, that a step went by in which nothing was packed."""
        if self._has_warned_idle:
            return
        self._has_warned_idle = True
        seen = (
            "no layer was seen running in training mode"
            if not self.num_layer_calls
            else "the layers ran, and autograd saved nothing in them"
        )
        logger.warning(
            "hf_pyao had nothing to offload in this step: %s. Compiled code may bypass hooks (call "
            "torch._dynamo.reset() and attach before the first compiled step), the model may be in "
            "eval mode (call model.train()), or all its layers may be frozen.",
            seen,
        )

    def _publish(self, tape: Tape) -> None:
        stats = tape.stats
        if tape.is_published or not stats.num_packs:
            return
        tape.is_published = True
        self.transport.collect(stats)
        self.pool.settle()
        stats.pool_bytes = self.pool.pool_bytes
        stats.host_peak_bytes = self.pool.peak_used_bytes
        self.pool.reset_peak()
        self.last_stats = stats
        self.totals.add(stats)

    def _release(self, record: SavedStorage) -> None:
        """Give back the buffers of a storage that no node can ask for any more.

        Runs in a destructor: on any thread and inside any other call, so it takes no lock.
        """
        if record.residency is Residency.RELOADING:
            self.transport.retire(record.reload_ticket)
            self._reloads.consumed(record)
        record.residency = Residency.RELEASED
        record.drop_device_copy()
        record.payload = ()
        if record.host is not None:
            self.pool.release(record.host, record.reload_ticket)
            record.host = None

    def _watch(self, tensor: torch.Tensor) -> VersionWatch:
        if isinstance(tensor, FakeTensor):
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return VersionWatch(tensor, empty)
        key = (tensor.dtype, tensor.device)
        if key not in self._empties:
            self._empties[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return VersionWatch(tensor, self._empties[key])


def _is_whole(handle: KeptTensor | SavedTensor) -> bool:
    """Say whether all of a storage can be had through *handle*, without replaying anything."""
    if isinstance(handle, KeptTensor):
        return True
    return isinstance(handle.storage, SavedStorage) and handle.storage.is_whole


class _KeptSlot:
    """Notes in the storage table that a storage stays on the device."""

    __slots__ = ("ordinal", "path")

    def __init__(self, path: str, ordinal: int) -> None:
        self.path = path
        self.ordinal = ordinal
