"""The forward side: what becomes of each tensor that autograd saves.

``pack`` reads: look whether it can move, whether it was seen, decide, encode, offload, record. It
runs for every saved tensor of every layer, so the common case is written out and what is rare is
left to functions of its own. In-place changes: see [Note: In-place changes] in ``watching``.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.nn import Parameter

from hf_pyao.codecs import Codec
from hf_pyao.runtime.equal_casts import cast_key
from hf_pyao.runtime.layout import (
    SUBCLASS,
    UNSUPPORTED,
    Layouts,
    has_bytes,
    nbytes_of,
    reason_not_movable,
)
from hf_pyao.runtime.offloading import HOST_FULL, StorageOffloader
from hf_pyao.runtime.parameters import is_parameter
from hf_pyao.runtime.policy import Candidate, Decision, Keep, Offload, Policy, Recompute
from hf_pyao.runtime.saved_tensor import KeptTensor, SavedStorage, SavedTensor
from hf_pyao.runtime.tape import LayerCall, Note, Slot
from hf_pyao.runtime.watching import SlotLabel, WatchedStorage

if TYPE_CHECKING:
    from hf_pyao.runtime.recomputer import Recomputer

LAST_LAYER = "last layer"

_KEEP_LAST = Keep(LAST_LAYER)
_KEEP_SHARED = Keep("shared by layers")
_KEEP_ELSEWHERE = Keep("not on the device")
_KEEP_EMPTY = Keep("empty")

Handle = KeptTensor | SavedTensor


class Packer:
    """Takes over what autograd saves: keeps it, queues its copy to the host, or drops it.

    Args:
        policy: decides per distinct saved storage.
        codec: how offloaded storages are written, unless the decision names another.
        handles: says whether tensors on a device can be moved.
        offloader: queues the copies.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        codec: Codec,
        handles: Callable[[torch.device], bool],
        offloader: StorageOffloader,
    ) -> None:
        self.policy = policy
        self.recomputer: Recomputer | None = None
        self.buffer_keys: frozenset[int] = frozenset()
        """Storages of the model's buffers, which never move."""
        self._codec = codec
        self._handles = handles
        self._offloader = offloader
        self._layouts = Layouts()
        self._handled: dict[torch.device, bool] = {}

    def pack_traced(self, call: LayerCall, tensor: torch.Tensor) -> Handle:
        """Do as :meth:`pack`, where layers may be traced: what follows is no part of a layer."""
        trace = call.trace
        if trace is None:
            return self.pack(call, tensor)
        trace.is_paused = True
        try:
            return self.pack(call, tensor)
        finally:
            trace.is_paused = False

    def store(self, call: LayerCall, tensor: torch.Tensor) -> Handle:
        """Store *tensor*, which autograd did not save, to rebuild others from it."""
        storage = tensor.untyped_storage()
        entries = call.tape.table.entries.get(storage._cdata)
        if entries is None:
            entries = call.tape.table.add(storage)
            call.anchor_keys.add(storage._cdata)
        elif tensor.requires_grad:  # versions of others need not tell, where a layer is traced
            known = self._find(call, tensor, entries)
            if known is not None and _is_whole(known):
                return known
        label = call.layer.label(call.paths[-1])
        nbytes = storage.nbytes()
        layer, path, ordinal = label
        candidate = Candidate(layer, call.layer.index, path, ordinal, nbytes, tensor.dtype)
        slot = Slot(label, candidate)
        decision = self._decide(call, tensor, storage, slot)
        if isinstance(decision, Recompute):
            decision = decision.otherwise
        return self._move_or_keep(call, tensor, storage, entries, slot, decision)

    def pack(self, call: LayerCall, tensor: torch.Tensor) -> Handle:
        """Take over *tensor*, which autograd saves in *call*; return what stands for it."""
        stats = call.tape.stats
        stats.num_packs += 1
        reason = reason_not_movable(tensor)
        if reason is not None:
            return self._keep_unmovable(call, tensor, reason)
        if is_parameter(tensor, call.frozen_shapes):
            return self._keep_parameter(call, tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.buffer_keys:
            label = call.layer.label(call.paths[-1])
            return KeptTensor(tensor.detach(), tensor._version, call, label)
        if not self._codec.is_lossless:
            call.saved_shapes.add(tuple(tensor.shape))
        table = call.tape.table
        entries = table.entries.get(key)
        if entries is None:
            entries = table.add(storage)
            stats.would_hold_bytes += storage.nbytes()
            if call.cast_input is not None and call.trace is None:
                return self._pack_cast(call, tensor, call.cast_input, storage, entries)
        elif (known := self._find(call, tensor, entries)) is not None:
            if call.anchor_keys and key in call.anchor_keys:
                call.anchor_keys.remove(key)
                stats.would_hold_bytes += storage.nbytes()
            return known
        return self._place(call, tensor, storage, entries)

    def _pack_cast(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        source: torch.Tensor,
        storage: torch.UntypedStorage,
        entries: list[Note],
    ) -> Handle:
        """Take over what a projection saves: perhaps a cast equal to one that was moved already."""
        key = cast_key(tensor, source)
        if key is None:
            return self._place(call, tensor, storage, entries)
        ref = call.casts.get(key)
        record = ref() if ref is not None else None
        if record is not None and record.nbytes == storage.nbytes():
            layout = self._layouts.of(tensor)
            record.watch(tensor, layout)
            if record.home is not None:
                record.home.note_visitor()
            entries.append(weakref.ref(record))
            call.tape.stats.duplicate_bytes += record.nbytes
            return SavedTensor(record, layout, call)
        handle = self._place(call, tensor, storage, entries)
        if isinstance(handle, SavedTensor) and _is_whole(handle):
            assert isinstance(handle.storage, SavedStorage)
            if handle.storage.queue_copy is None:
                call.casts[key] = weakref.ref(handle.storage)
        return handle

    def _place(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        entries: list[Note],
    ) -> Handle:
        """Decide on a storage that is new to the tape, and act on it."""
        slot = call.next_slot(storage.nbytes(), tensor.dtype)
        decision = self._decide(call, tensor, storage, slot)
        if type(decision) is Keep:
            return self._keep(call, tensor, storage, entries, slot, decision.reason)
        if isinstance(decision, Recompute):
            dropped = self._drop(call, tensor, storage, entries, slot.label)
            if dropped is not None:
                return dropped
            decision = decision.otherwise
        return self._move_or_keep(call, tensor, storage, entries, slot, decision)

    def _keep_parameter(self, call: LayerCall, tensor: torch.Tensor) -> KeptTensor:
        # The object itself: ZeRO-3 exchanges the data of a Parameter behind our back, and a
        # detached copy would pin what it gathered. No node saves a parameter as its own output, so
        # holding it makes no cycle.
        return KeptTensor(tensor, tensor._version, call, call.layer.label(call.paths[-1]))

    def _keep_unmovable(self, call: LayerCall, tensor: torch.Tensor, reason: str) -> KeptTensor:
        if reason == SUBCLASS and isinstance(tensor, Parameter):
            return self._keep_parameter(call, tensor)
        nbytes = nbytes_of(tensor) if tensor.layout is torch.strided else 0
        call.tape.stats.would_hold_bytes += nbytes
        call.tape.stats.kept_bytes[reason] += nbytes
        label = call.layer.label(call.paths[-1])
        return KeptTensor(tensor.detach(), tensor._version, call, label)

    def _find(self, call: LayerCall, tensor: torch.Tensor, entries: list[Note]) -> Handle | None:
        """Return a handle on what *tensor*'s storage became when it was saved before."""
        version = tensor._version
        for entry in entries:
            if isinstance(entry, SlotLabel):
                return KeptTensor(tensor.detach(), version, call, entry)
            record = entry()
            if record is None or record.version != version:
                continue
            shares_counter = record.shares_counter_with(tensor)
            layout = record.layout
            if not (layout.is_of(tensor) and (shares_counter or not version)):
                if not record.covers(tensor, shares_counter):
                    continue
                layout = self._layouts.of(tensor)
                record.stand_for(layout)
            if not shares_counter:
                record.watch(tensor, layout)
            if record.home is not None:
                record.home.note_visitor()
            return SavedTensor(record, layout, call)
        return None

    def _decide(
        self, call: LayerCall, tensor: torch.Tensor, storage: torch.UntypedStorage, slot: Slot
    ) -> Decision:
        """Ask the policy, unless there is a reason of ours to keep *tensor*."""
        candidate = slot.candidate
        if call.shared_keys and storage._cdata in call.shared_keys:
            return _KEEP_SHARED
        if not candidate.nbytes:
            return _KEEP_EMPTY
        if call.is_kept:
            return _KEEP_LAST
        if self.recomputer is not None:
            producer = self.recomputer.producer_of(call, storage)
            if producer is not None:
                candidate = dataclasses.replace(candidate, producer=producer)
        decision = self.policy.decide(candidate)
        if type(decision) is Keep:
            return decision
        if not tensor.numel():
            return _KEEP_EMPTY
        device = tensor.device
        is_handled = self._handled.get(device)
        if is_handled is None:
            is_handled = self._handled[device] = self._handles(device)
        return decision if is_handled else _KEEP_ELSEWHERE

    def _drop(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        entries: list[Note],
        slot: SlotLabel,
    ) -> SavedTensor | None:
        """Let *tensor*'s storage go, to be rebuilt; None if it cannot be."""
        assert self.recomputer is not None
        layout = self._layouts.of(tensor)
        dropped = self.recomputer.drop(call, tensor, layout, storage, slot)
        if dropped is None:
            return None
        self._offloader.let_go_of_dropped(dropped, storage)
        entries.append(weakref.ref(dropped))
        return SavedTensor(dropped, layout, call)

    def _move_or_keep(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        entries: list[Note],
        slot: Slot,
        decision: Keep | Offload,
    ) -> Handle:
        """Store *tensor*'s storage where *decision* says."""
        if isinstance(decision, Keep):
            return self._keep(call, tensor, storage, entries, slot, decision.reason)
        if not has_bytes(tensor):
            return self._keep(call, tensor, storage, entries, slot, UNSUPPORTED)
        layout = self._layouts.of(tensor)
        codec = decision.codec or self._codec
        record = self._offloader.offload(call, tensor, layout, slot, codec)
        if record is None:
            return self._keep(call, tensor, storage, entries, slot, HOST_FULL)
        entries.append(weakref.ref(record))
        handle = SavedTensor(record, layout, call)
        if self.recomputer is not None:
            self.recomputer.note_stored(call, storage, tensor, handle)
        return handle

    def _keep(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        entries: list[Note],
        slot: Slot,
        reason: str,
    ) -> KeptTensor:
        """Leave *tensor*'s storage where it is."""
        call.tape.stats.kept_bytes[reason] += slot.candidate.nbytes
        entries.append(slot.label)
        handle = KeptTensor(tensor.detach(), tensor._version, call, slot.label)
        if self.recomputer is not None:
            self.recomputer.note_stored(call, storage, tensor, handle)
        return handle


def _is_whole(handle: Handle) -> bool:
    """Say whether all of a storage can be had through *handle*, without replaying anything."""
    if isinstance(handle, KeptTensor):
        return True
    record: WatchedStorage = handle.storage
    return isinstance(record, SavedStorage) and record.is_whole
