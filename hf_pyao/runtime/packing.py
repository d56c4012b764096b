"""The forward side: what becomes of each tensor that autograd saves.

``pack`` reads: look whether it can move, whether it was seen, decide, encode, offload, record. It
runs for every saved tensor of every layer, so the common case is written out and what is rare is
left to functions of its own.

[Note: In-place changes]
Hooks switch off autograd's version check. A kept tensor is compared with its version at unpack. For
an offloaded one a ``VersionWatch`` outlives the device copy, so that a change at any time before
unpack raises as it would without hooks, and does not depend on how far the copy had come.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.nn import Parameter

from hf_pyao.codecs import Codec
from hf_pyao.runtime.layout import (
    SUBCLASS,
    Blanks,
    bytes_view,
    is_row_statistic,
    nbytes_of,
    part_targets,
    place_parts,
    range_to_move,
    reason_not_movable,
    rows_view,
    view_of_storage,
)
from hf_pyao.runtime.parameters import is_parameter
from hf_pyao.runtime.policy import Candidate, Decision, Keep, Offload, Policy, Recompute
from hf_pyao.runtime.ranges import in_range, is_profiling
from hf_pyao.runtime.saved_tensor import (
    KeptTensor,
    SavedStorage,
    SavedTensor,
    SlotLabel,
    WatchedStorage,
)
from hf_pyao.runtime.tape import LayerCall
from hf_pyao.runtime.transport import Transport
from hf_pyao.runtime.window import OffloadWindow
from hf_pyao.stores import HostPool

if TYPE_CHECKING:
    from hf_pyao.runtime.recomputer import Recomputer

HOST_FULL = "host memory full"

_KEEP_LAST = Keep("last layer")
_KEEP_SHARED = Keep("shared by layers")
_KEEP_ELSEWHERE = Keep("not on the device")
_KEEP_EMPTY = Keep("empty")

Handle = KeptTensor | SavedTensor


class Packer:
    """Takes over what autograd saves: keeps it, queues its copy to the host, or drops it.

    Args:
        policy: decides per distinct saved storage.
        codec: how offloaded storages are written, unless the decision names another.
        transport: copies bytes.
        pool: host memory.
        window: device copies that wait to leave.
        on_release: called with each storage that no graph node can ask for any more, from its
            destructor.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        codec: Codec,
        transport: Transport,
        pool: HostPool,
        window: OffloadWindow,
        on_release: Callable[[SavedStorage], None],
    ) -> None:
        self.recomputer: Recomputer | None = None
        self.buffer_keys: frozenset[int] = frozenset()
        """Storages of the model's buffers, which never move."""
        self.policy = policy
        self._codec = codec
        self._transport = transport
        self._pool = pool
        self._window = window
        self._on_release = on_release
        self._blanks = Blanks()
        self._byte_blanks: dict[torch.device, torch.Tensor] = {}
        self._handled: dict[torch.device, bool] = {}
        """Whether the transport moves tensors on a device."""

    def pack(self, call: LayerCall, tensor: torch.Tensor) -> Handle:
        """Take over *tensor*, which autograd saves in *call*; return what stands for it."""
        trace = call.trace
        if trace is None:
            return self._pack(call, tensor)
        trace.is_paused = True  # what follows is no part of the layer
        try:
            return self._pack(call, tensor)
        finally:
            trace.is_paused = False

    def store(self, call: LayerCall, tensor: torch.Tensor) -> Handle:
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
        slot = call.layer.slot(call.paths[-1], -1)
        decision = self._decide(call, tensor, storage, slot)
        if isinstance(decision, Recompute):
            decision = decision.otherwise
        return self._move_or_keep(call, tensor, storage, entries, slot, decision)

    def _pack(self, call: LayerCall, tensor: torch.Tensor) -> Handle:
        stats = call.tape.stats
        stats.num_packs += 1
        reason = reason_not_movable(tensor)
        if reason is not None:
            return self._keep_unmovable(call, tensor, reason)
        if is_parameter(tensor, call.frozen_shapes):
            # The object itself: ZeRO-3 exchanges the data of a Parameter behind our back, and a
            # detached copy would pin what it gathered. No node saves a parameter as its own
            # output, so holding it makes no cycle.
            slot = call.layer.slot(call.paths[-1], -1)
            return KeptTensor(tensor, tensor._version, call, slot)
        storage = tensor.untyped_storage()
        if storage._cdata in self.buffer_keys:
            slot = call.layer.slot(call.paths[-1], -1)
            return KeptTensor(tensor.detach(), tensor._version, call, slot)
        if not self._codec.is_lossless:
            call.saved_shapes.add(tuple(tensor.shape))
        table = call.tape.table
        entries = table.entries(storage)
        if entries is None:
            entries = table.add(storage)
            stats.would_hold_bytes += storage.nbytes()
        elif (known := self._find(call, tensor, entries)) is not None:
            if call.anchor_keys and storage._cdata in call.anchor_keys:
                call.anchor_keys.remove(storage._cdata)
                stats.would_hold_bytes += storage.nbytes()
            return known
        path = call.paths[-1]
        ordinal = call.ordinals[path]
        call.ordinals[path] = ordinal + 1
        stats.num_slots += 1
        slot = call.layer.slot(path, ordinal)
        decision = self._decide(call, tensor, storage, slot)
        if isinstance(decision, Recompute):
            dropped = self._drop(call, tensor, storage, entries, slot)
            if dropped is not None:
                return dropped
            decision = decision.otherwise
        return self._move_or_keep(call, tensor, storage, entries, slot, decision)

    def _keep_unmovable(self, call: LayerCall, tensor: torch.Tensor, reason: str) -> KeptTensor:
        slot = call.layer.slot(call.paths[-1], -1)
        if reason == SUBCLASS and isinstance(tensor, Parameter):
            return KeptTensor(tensor, tensor._version, call, slot)
        nbytes = nbytes_of(tensor) if tensor.layout is torch.strided else 0
        call.tape.stats.would_hold_bytes += nbytes
        call.tape.stats.kept_bytes[reason] += nbytes
        return KeptTensor(tensor.detach(), tensor._version, call, slot)

    def _find(self, call: LayerCall, tensor: torch.Tensor, entries: list[object]) -> Handle | None:
        """Return a handle on what *tensor*'s storage became when it was saved before."""
        version = tensor._version
        for entry in entries:
            if type(entry) is SlotLabel:
                return KeptTensor(tensor.detach(), version, call, entry)
            assert isinstance(entry, weakref.ref)
            record = entry()
            if record is not None and record.covers(tensor, version):
                blank = self._blanks.like(tensor)
                record.watch_too(tensor, blank)
                return SavedTensor(record, tensor, blank, call)
        return None

    def _decide(
        self, call: LayerCall, tensor: torch.Tensor, storage: torch.UntypedStorage, slot: SlotLabel
    ) -> Decision:
        """Ask the policy, unless there is a reason of ours to keep *tensor*."""
        nbytes = storage.nbytes()
        if call.shared_keys and storage._cdata in call.shared_keys:
            return _KEEP_SHARED
        if not nbytes or not tensor.numel():
            return _KEEP_EMPTY
        device = tensor.device
        is_handled = self._handled.get(device)
        if is_handled is None:
            is_handled = self._handled[device] = self._transport.handles(device)
        if not is_handled:
            return _KEEP_ELSEWHERE
        if call.is_kept:
            return _KEEP_LAST
        producer = None
        if self.recomputer is not None:
            producer = self.recomputer.producer_of(call, storage)
        layer, path, ordinal = slot
        return self.policy.decide(
            Candidate(layer, call.layer.index, path, ordinal, nbytes, tensor.dtype, producer)
        )

    def _drop(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        entries: list[object],
        slot: SlotLabel,
    ) -> SavedTensor | None:
        """Let *tensor*'s storage go, to be rebuilt; None if it cannot be."""
        assert self.recomputer is not None
        blank = self._blanks.like(tensor)
        dropped = self.recomputer.drop(call, tensor, blank, storage, slot)
        if dropped is None:
            return None
        entries.append(weakref.ref(dropped))
        return SavedTensor(dropped, tensor, blank, call)

    def _move_or_keep(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        entries: list[object],
        slot: SlotLabel,
        decision: Keep | Offload,
    ) -> Handle:
        """Store *tensor*'s storage where *decision* says."""
        handle: Handle | None = None
        if type(decision) is Offload:
            handle = self._offload(call, tensor, storage, entries, slot, decision.codec)
        if handle is None:
            reason = decision.reason if isinstance(decision, Keep) else HOST_FULL
            call.tape.stats.kept_bytes[reason] += storage.nbytes()
            entries.append(slot)
            handle = KeptTensor(tensor.detach(), tensor._version, call, slot)
        if self.recomputer is not None:
            self.recomputer.note_stored(call, storage, tensor, handle)
        return handle

    def _offload(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        entries: list[object],
        slot: SlotLabel,
        codec: Codec | None,
    ) -> SavedTensor | None:
        """Queue the copy of *tensor*'s storage to the host; None if the host has no room."""
        start, end = 0, storage.nbytes()
        if tensor.nbytes != end:
            start, end = range_to_move(tensor, end)
        if codec is None:
            codec = self._codec
        blank = self._blanks.like(tensor)
        pool = self._pool
        nbytes = end - start
        if codec.name != "identity":
            rows = self._rows_to_encode(call, tensor, storage, start, end, codec)
            if rows is not None:
                record = self._encode(call, tensor, blank, slot, start, end, codec, rows)
                return self._recorded(record, tensor, blank, call, entries)
        host = pool.acquire(nbytes)
        if host is None:
            return None
        record = SavedStorage(call, slot, start, nbytes, tensor, blank, host, self._on_release)
        flat = self._flat(storage, tensor, start, nbytes)
        record.payload = (flat,)
        offload = self._transport.offload
        if is_profiling():
            offload = in_range(offload, "offload", slot.layer)
        record.offload_ticket = offload(flat, host.data, after=pool.barriers, label=slot)
        return self._recorded(record, tensor, blank, call, entries)

    def _recorded(
        self,
        record: SavedStorage | None,
        tensor: torch.Tensor,
        blank: torch.Tensor,
        call: LayerCall,
        entries: list[object],
    ) -> SavedTensor | None:
        """Enter *record*, whose copy is queued, wherever it is looked for."""
        if record is None:
            return None
        stats = call.tape.stats
        stats.offloaded_bytes += record.nbytes
        stats.link_bytes += record.device_bytes
        ref = weakref.ref(record)
        call.records.append(ref)
        entries.append(ref)
        self._window.add(record, record.device_bytes)
        return SavedTensor(record, tensor, blank, call)

    def _flat(
        self, storage: torch.UntypedStorage, tensor: torch.Tensor, start: int, nbytes: int
    ) -> torch.Tensor:
        """View bytes of *storage* as a flat uint8 tensor; nothing is copied."""
        device = tensor.device
        blank = self._byte_blanks.get(device)
        if blank is None or type(tensor) is not torch.Tensor:
            flat = bytes_view(storage, device, start, start + nbytes)
            if type(tensor) is torch.Tensor:
                self._byte_blanks[device] = torch.empty(0, dtype=torch.uint8, device=device)
            return flat
        return view_of_storage(blank, storage, start, (nbytes,), (1,))

    def _rows_to_encode(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        start: int,
        end: int,
        codec: Codec,
    ) -> torch.Tensor | None:
        """View a storage's bytes as a codec reads them; None if they must stay as they are."""
        if not codec.is_lossless and is_row_statistic(tensor, call.saved_shapes):
            return None
        rows = rows_view(tensor, storage, start, end)
        if rows is None or not codec.accepts(tensor) or not codec.accepts(rows):
            return None
        return rows

    def _encode(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        blank: torch.Tensor,
        slot: SlotLabel,
        start: int,
        end: int,
        codec: Codec,
        rows: torch.Tensor,
    ) -> SavedStorage | None:
        """Encode *rows* and queue the copy of the payload; None if the host has no room."""
        encoded = codec.encode(rows)
        places, nbytes = place_parts(encoded.payload)
        host = self._pool.acquire(nbytes)
        if host is None:
            return None
        record = SavedStorage(call, slot, start, end - start, tensor, blank, host, self._on_release)
        record.codec, record.spec, record.parts = codec, encoded.spec, places
        record.payload = encoded.payload
        record.device_bytes = nbytes
        offload = self._transport.offload
        if is_profiling():
            offload = in_range(offload, "offload", slot.layer)
        for part, target in zip(encoded.payload, part_targets(host.data, places), strict=True):
            source = part.contiguous().view(-1).view(torch.uint8)
            record.offload_ticket = offload(source, target, after=self._pool.barriers, label=slot)
        return record


def _is_whole(handle: Handle) -> bool:
    """Say whether all of a storage can be had through *handle*, without replaying anything."""
    if isinstance(handle, KeptTensor):
        return True
    record: WatchedStorage = handle.storage
    return isinstance(record, SavedStorage) and record.is_whole
