"""The forward side: keeps, moves or drops each tensor that autograd saves.

``pack`` checks whether a tensor can move and whether it was seen before, asks the policy, moves or
keeps the tensor, and records that. It runs for every saved tensor of every layer, so the common
case is written out, and rare cases are in functions of their own. In-place
changes: see [Note: In-place changes] in ``saved_tensor``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

from hf_pyao.engine.codecs import Codec, get_codec
from hf_pyao.engine.codecs.row_statistics import is_row_statistic
from hf_pyao.engine.runtime.equal_casts import cast_key
from hf_pyao.engine.runtime.flattened_tensor import flatten
from hf_pyao.engine.runtime.parameters import is_parameter, makes_new_tensors
from hf_pyao.engine.runtime.policy import Decision, Keep, Offload, Recompute, Situation
from hf_pyao.engine.runtime.recomputation import Anchor, Refused
from hf_pyao.engine.runtime.saved_tensor import (
    FlattenedTensor,
    Handle,
    KeptTensor,
    Record,
    SavedStorage,
    SavedTensor,
    whole_source,
)
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.engine.runtime.streamed_weights import StreamedTensor, StreamedWeights
from hf_pyao.engine.runtime.tape import Entries, Entry, LayerCall, SlotEntry, Tape
from hf_pyao.engine.transfer.layout import (
    PLAIN_DTYPES,
    Layouts,
    Stays,
    TensorLayout,
    has_bytes,
    has_storage,
    num_modes,
    reason_not_movable,
)
from hf_pyao.engine.transfer.mover import Mover

_TENSOR, _STRIDED = torch.Tensor, torch.strided


class Packer:
    """Takes over what autograd saves: keeps it, moves it to the host, or drops it.

    Args:
        codec: how moved storages are written, unless a decision names another.
        mover: moves them.
    """

    def __init__(self, *, codec: Codec, mover: Mover) -> None:
        self.weights: StreamedWeights | None = None
        """Weights that are streamed; None: all are on the device."""
        self.buffer_keys: Container[int] = frozenset()
        """Storages of the model's buffers, which never move."""
        self._codec = codec
        self._exact = get_codec("identity")
        self._notes_shapes = not codec.is_lossless
        """Statistics of rows are known by the shapes of what else a call saves."""
        self._tape_without_shapes: weakref.ref[Tape] | None = None
        """The forward in which a codec that loses was asked for the first time."""
        self._packs_parts = False
        """Whether what is packed is a part of a tensor of a subclass, which stays exact."""
        self._mover = mover
        self._handles: Callable[[torch.device], bool] = mover.link.transport.handles
        self._layouts = Layouts()
        self._makes_new: dict[type, bool] = {}
        """By type of node, :func:`makes_new_tensors`; but for nodes of functions that users write,
        each of which has a type of its own."""
        self._handled: dict[torch.device, bool] = {}
        self._movable_layouts: set[TensorLayout] = set()
        """Those of tensors that were moved: not empty, and on a device that is handled."""

    def expect_buffers(self, buffer_keys: Container[int]) -> None:
        """Leave the storages with *buffer_keys* where they are, as a forward begins."""
        self.buffer_keys = buffer_keys

    def note_shapes(self) -> None:
        """Note what calls save from here on: a lossy codec is going to be asked for."""
        self._notes_shapes = True

    def pack_traced(self, call: LayerCall, tensor: torch.Tensor) -> Handle:
        """Do as :meth:`pack`, in a traced layer: what follows is no part of it."""
        recomputation = call.recomputation
        if recomputation is None:
            return self.pack(call, tensor)
        recomputation.pause()
        try:
            return self.pack(call, tensor)
        finally:
            recomputation.go_on()

    def pack(self, call: LayerCall, tensor: torch.Tensor) -> Handle:
        """Take over *tensor*, which autograd saves in *call*; return what stands for it."""
        stats = call.stats
        stats.num_packs += 1
        if self.weights is not None:
            streamed = self._streamed(call, tensor, call.paths[-1])
            if streamed is not None:
                return streamed
        kind = type(tensor)
        if kind is Parameter:
            return self._keep_parameter(call, tensor)
        if (  # mostly: reason_not_movable() would find none
            kind is not _TENSOR
            or tensor.layout is not _STRIDED
            or tensor.is_nested
            or tensor.is_neg()
            or tensor.dtype not in PLAIN_DTYPES
        ):
            reason = reason_not_movable(tensor)
            if reason is Stays.SUBCLASS:
                return self._pack_subclass(call, tensor)
            if reason is not None:
                return self._keep_unmovable(call, tensor, reason)
        # Mostly no is_parameter(): of an operation that gives neither a view nor a cast, or a view
        # of what such a one has made.
        node, base = tensor.grad_fn, tensor._base
        if base is not None:
            if type(base) is Parameter:
                return self._keep_parameter(call, tensor)
            node = base.grad_fn if type(base) is _TENSOR else None
        makes_new = self._makes_new.get(type(node))
        if not makes_new:
            if is_parameter(tensor, call.frozen_shapes):
                return self._keep_parameter(call, tensor)
            if makes_new is None and not isinstance(node, BackwardCFunction):
                self._makes_new[type(node)] = makes_new_tensors(node)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.buffer_keys:
            return _kept(tensor, call, call.layer.unnamed(call.paths[-1]))
        if self._notes_shapes:
            call.saved_shapes.add(tuple(tensor.shape))
        entries = call.table.entries.get(key)
        if entries is None:
            nbytes = storage.nbytes()
            stats.would_hold_bytes += nbytes
            source = call.cast_input
            if source is not None and not (call.recomputation and call.recomputation.is_traced):
                return self._pack_cast(call, tensor, source, storage, nbytes)
        else:
            known = self._find(call, tensor, entries)
            if known is not None:
                if call.recomputation is not None and call.is_first_save_of_anchor(key):
                    stats.would_hold_bytes += storage.nbytes()
                return known
            nbytes = storage.nbytes()
        return self._place(call, tensor, storage, entries, nbytes)

    def _pack_cast(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        source: torch.Tensor,
        storage: torch.UntypedStorage,
        nbytes: int,
    ) -> Handle:
        """Take over what a projection saves: perhaps a cast equal to one that was moved already."""
        key = cast_key(tensor, source)
        ref = None if key is None else call.casts.get(key)
        record = ref() if ref is not None else None
        is_elsewhere = call.tape.has_streams and call.tape.is_elsewhere(tensor.device)
        if record is not None and record.nbytes == nbytes and not is_elsewhere:
            self._decide(call, call.next_entry(nbytes, tensor.dtype), Stays.DUPLICATE)
            layout = self._layouts.of(tensor)
            record.watch(tensor, layout)
            call.table.add(storage, weakref.ref(record))
            call.stats.duplicate_bytes += nbytes
            return SavedTensor(record, layout, call)
        handle = self._place(call, tensor, storage, None, nbytes)
        if key is not None and isinstance(handle, SavedTensor):
            new = handle.storage
            if isinstance(new, SavedStorage) and new.is_whole_copy:
                call.casts[key] = weakref.ref(new)
        return handle

    def _streamed(self, call: LayerCall, tensor: torch.Tensor, path: str) -> StreamedTensor | None:
        """Return what stands for *tensor* if it is a streamed weight; None otherwise."""
        give = None if self.weights is None else self.weights.find(tensor)
        return None if give is None else StreamedTensor(give, call, call.layer.unnamed(path))

    # ---- what was seen -------------------------------------------------------------------------

    def _find(self, call: LayerCall, tensor: torch.Tensor, entries: Entries) -> Handle | None:
        """Return a handle on what *tensor*'s storage became when it was saved before."""
        version = tensor._version
        if type(entries) is Slot:
            return _kept(tensor, call, entries)
        several: list[Entry] = entries  # type: ignore[assignment]
        recomputation = call.recomputation
        if recomputation is not None and recomputation.was_written(tensor):
            several.clear()  # they stand for what it held before
        for entry in several:
            if isinstance(entry, Slot):
                return _kept(tensor, call, entry)
            record: Record | None = entry()
            if record is None or record.version != version:
                continue
            if record.home is not None and call.tape.is_elsewhere(tensor.device):
                return self._keep(
                    call, tensor, tensor.untyped_storage(), record.slot, Stays.OTHER_STREAM
                )
            shares_counter = record.shares_counter_with(tensor)
            layout = record.layout
            if not (layout.is_of(tensor) and (shares_counter or not version)):
                if not record.covers(tensor, shares_counter):
                    continue
                layout = self._layouts.of(tensor)
                record.stand_for(layout)
            if not shares_counter:
                record.watch(tensor, layout)
            if record.home is None and not (
                call.casts or (recomputation is not None and recomputation.is_traced)
            ):
                record.renew(tensor)
            return SavedTensor(record, layout, call)
        return None

    # ---- what is new ---------------------------------------------------------------------------

    def _place(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        entries: Entries | None,
        nbytes: int,
    ) -> Handle:
        """Decide on a storage, or a content of one, that is new to the tape, and act on it."""
        if call.shared_keys and storage._cdata in call.shared_keys:
            slot = call.shared(nbytes, tensor.dtype)
            shared = _ask(call, slot, None, Stays.SHARED)
            return self._carry_out(call, tensor, storage, slot, Stays.SHARED, shared)
        entry = call.next_entry(nbytes, tensor.dtype)
        if call.recomputation is not None:
            return self._place_traced(call, tensor, storage, entry.slot)
        decision = entry.decision
        if entry.policy is call.policy and self._mover.observer is None:  # mostly: that holds
            if type(decision) is Keep:
                if entries is not None:
                    return self._keep(call, tensor, storage, entry.slot, decision.reason)
                call.stats.kept_bytes[decision.reason] += nbytes
                table, slot = call.table.entries, entry.slot
                table[storage._weak_ref()] = slot  # type: ignore[index]
                return KeptTensor(tensor.detach(), tensor._version, call, slot)
            if type(decision) is Offload:
                layout = self._layouts.of(tensor)
                if layout in self._movable_layouts:
                    return self._move(call, tensor, storage, entry.slot, decision, layout)
        stays = self._reason_to_stay(call, tensor, storage, nbytes)
        if entry.policy is not call.policy or entry.stays is not stays or decision is None:
            decision = self._decide(call, entry, stays)
        return self._carry_out(call, tensor, storage, entry.slot, stays, decision)

    def _reason_to_stay(
        self, call: LayerCall, tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int
    ) -> Stays | None:
        """Say why *tensor*'s storage stays whatever the policy decides; None if it need not."""
        if call.shared_keys and storage._cdata in call.shared_keys:
            return Stays.SHARED
        if not nbytes or not tensor.numel():
            return Stays.EMPTY
        device = tensor.device
        is_handled = self._handled.get(device)
        if is_handled is None:
            is_handled = self._handled[device] = self._handles(device)
        return None if is_handled else Stays.ELSEWHERE

    def _decide(self, call: LayerCall, entry: SlotEntry, stays: Stays | None) -> Decision:
        """Ask the policy; if its answer holds from call to call, remember it."""
        decision = _ask(call, entry.slot, None, stays)
        if call.policy.is_static:
            entry.remember(call.policy, stays, decision)
        return decision

    def _place_traced(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        slot: Slot,
    ) -> Handle:
        """Decide on a storage of a traced layer, which may be dropped too."""
        assert call.recomputation is not None
        if call.tape.has_streams and call.tape.is_elsewhere(tensor.device):
            call.fork()
        stays = self._reason_to_stay(call, tensor, storage, slot.nbytes)
        decision = _ask(call, slot, call.recomputation.producer_of(storage), stays)
        if isinstance(decision, Recompute):
            dropped = self._drop(call, tensor, storage, slot)
            if dropped is not None:
                if self._mover.observer is not None:
                    self._mover.observer.on_slot(slot, stays, decision)
                return dropped
            decision = decision.otherwise
        return self._carry_out(call, tensor, storage, slot, stays, decision)

    def _drop(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        slot: Slot,
    ) -> SavedTensor | None:
        """Let *tensor*'s storage go, to be rebuilt; None if it cannot be."""
        if not has_bytes(tensor):  # nothing could be compared with what is rebuilt
            return None
        if call.is_forked:  # a replay would read on one stream what others made and let go of
            call.stats.not_recomputed_bytes[Stays.OTHER_STREAM] += slot.nbytes
            return None
        recomputation = call.recomputation
        assert recomputation is not None
        layout = self._layouts.of(tensor)
        record: Record | None = recomputation.known(tensor, storage)
        if record is not None:  # what was noted for its storage is gone: the tape was closed
            record.stand_for(layout)
            if not record.shares_counter_with(tensor):
                record.watch(tensor, layout)
        else:
            recipe = recomputation.recipe_for(tensor, storage, call.shared_keys)
            if isinstance(recipe, Refused):
                call.stats.not_recomputed_bytes[recipe.reason] += storage.nbytes()
                return None
            for anchor in recipe.anchors:
                recomputation.stored(anchor, self._store(call, anchor))
            record = recomputation.drop(recipe, call, tensor, layout, slot)
            assert record is not None
            call.stats.recomputed_bytes += record.nbytes
        call.table.add(storage, weakref.ref(record))
        return SavedTensor(record, layout, call)

    def _store(self, call: LayerCall, anchor: Anchor) -> KeptTensor | SavedStorage | StreamedTensor:
        """Store *anchor*, which autograd did not save; return what reads it in backward."""
        tensor = anchor.tensor
        streamed = self._streamed(call, tensor, anchor.path)
        if streamed is not None:
            return streamed
        storage = tensor.untyped_storage()
        key = storage._cdata
        entries = call.table.entries.get(key)
        nbytes = storage.nbytes()
        slot = call.anchor(key, anchor.path, nbytes, tensor.dtype)
        if entries is not None:
            call.is_first_save_of_anchor(key)  # it was saved already
            if tensor.requires_grad:  # versions of others need not tell, where a layer is traced
                known = self._find(call, tensor, entries)
                source = None if known is None else whole_source(known)
                if source is not None:
                    return source
        stays = self._reason_to_stay(call, tensor, storage, nbytes)
        decision = _ask(call, slot, anchor.path, stays)
        if isinstance(decision, Recompute):
            decision = decision.otherwise
        handle = self._carry_out(call, tensor, storage, slot, stays, decision)
        if isinstance(handle, KeptTensor):
            return handle
        assert isinstance(handle, SavedTensor)
        assert isinstance(handle.storage, SavedStorage)
        return handle.storage

    def _carry_out(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        slot: Slot,
        stays: Stays | None,
        decision: Decision,
    ) -> Handle:
        """Move or keep *tensor*'s storage, as *decision* says, and tell the observer."""
        if self._mover.observer is not None:
            self._mover.observer.on_slot(slot, stays, decision)
        while type(decision) is Recompute:  # of a layer that is not traced
            call.stats.not_recomputed_bytes[NOT_TRACED] += slot.nbytes
            decision = decision.otherwise
        if type(decision) is Offload:
            layout = self._layouts.of(tensor)
            self._movable_layouts.add(layout)
            return self._move(call, tensor, storage, slot, decision, layout)
        assert isinstance(decision, Keep)
        return self._keep(call, tensor, storage, slot, decision.reason)

    def _keep(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        slot: Slot,
        reason: str | None,
    ) -> KeptTensor:
        """Leave *tensor*'s storage where it is, for *reason*; None if it is counted already."""
        if reason is not None:
            call.stats.kept_bytes[reason] += slot.nbytes
        entries = call.table.entries
        known = entries.get(storage._cdata)
        if known is None:
            entries[storage._weak_ref()] = slot  # type: ignore[index]
        elif isinstance(known, list):
            known.append(slot)
        kept = KeptTensor(tensor.detach(), tensor._version, call, slot)
        if reason is Stays.OTHER_STREAM:
            call.fork()
        if call.recomputation is not None and not call.is_forked:
            call.recomputation.note_stored(storage, tensor, kept)
        return kept

    def _move(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        slot: Slot,
        decision: Offload,
        layout: TensorLayout,
    ) -> Handle:
        """Move *tensor*'s storage off the device; where the mover finds no room, it stays."""
        if (num_modes() or tensor._is_zerotensor()) and not has_bytes(tensor):
            return self._keep(call, tensor, storage, slot, Stays.UNSUPPORTED)
        if call.tape.has_streams and call.tape.is_elsewhere(tensor.device):
            return self._keep(call, tensor, storage, slot, Stays.OTHER_STREAM)
        codec = decision.codec or self._codec
        if not codec.is_lossless and (self._packs_parts or self._is_row_statistic(call, tensor)):
            codec = self._exact
        record = SavedStorage(self._mover, call, slot, tensor, layout)
        if not self._mover.offload(record, codec):
            return self._keep(call, tensor, storage, slot, None)
        ref = weakref.ref(record)
        call.records.append(ref)
        if record.late_codec is not None:
            call.put_off.append(ref)
        call.table.add(storage, ref)
        if call.recomputation is not None and record.is_whole and not call.is_forked:
            call.recomputation.note_stored(storage, tensor, record)
        return SavedTensor(record, layout, call)

    # ---- what stays in any case ----------------------------------------------------------------

    def _is_row_statistic(self, call: LayerCall, tensor: torch.Tensor) -> bool:
        """Say whether no lossy codec may touch *tensor*.

        A policy may ask for such a codec where the configuration does not: until shapes are noted,
        whatever might be a statistic is taken for one.
        """
        if not self._notes_shapes:
            self._notes_shapes = True
            self._tape_without_shapes = weakref.ref(call.tape)
        ref = self._tape_without_shapes
        if ref is not None and ref() is call.tape and tensor.dtype == torch.float32:
            return True
        return is_row_statistic(tensor, call.saved_shapes)

    def _keep_parameter(self, call: LayerCall, tensor: torch.Tensor) -> KeptTensor:
        # The object itself: ZeRO-3 exchanges the data of a Parameter behind our back, and a
        # detached copy would pin what it gathered. No node saves a parameter as its own output, so
        # holding it makes no cycle.
        return KeptTensor(tensor, tensor._version, call, call.layer.unnamed(call.paths[-1]))

    def _pack_subclass(self, call: LayerCall, tensor: torch.Tensor) -> Handle:
        """Take over a tensor of a subclass: by its inner tensors, as they are, if it has such."""
        if isinstance(tensor, Parameter) or is_parameter(tensor, call.frozen_shapes):
            return self._keep_parameter(call, tensor)
        # What is rebuilt by replaying operations is known by what autograd saves, not by its parts.
        parts = None if call.recomputation is not None else flatten(tensor)
        if parts is None:
            return self._keep_unmovable(call, tensor, Stays.SUBCLASS)
        flattening, inner = parts
        call.stats.num_packs -= 1  # its parts are counted
        outer, self._packs_parts = self._packs_parts, True
        try:
            handles = {name: self.pack(call, each) for name, each in inner.items()}
        finally:
            self._packs_parts = outer
        slot = call.layer.unnamed(call.paths[-1])
        return FlattenedTensor(flattening, handles, call, slot)

    def _keep_unmovable(self, call: LayerCall, tensor: torch.Tensor, reason: Stays) -> KeptTensor:
        nbytes = tensor.nbytes if has_storage(tensor) else 0
        stats = call.stats
        stats.would_hold_bytes += nbytes
        stats.kept_bytes[reason] += nbytes
        entry = call.next_entry(nbytes, tensor.dtype)
        decision = self._decide(call, entry, reason)
        if self._mover.observer is not None:
            self._mover.observer.on_slot(entry.slot, reason, decision)
        return _kept(tensor, call, entry.slot)


def _kept(tensor: torch.Tensor, call: LayerCall, slot: Slot) -> KeptTensor:
    """Return the handle of *tensor*, which stays on the device, saved by *call* as *slot*."""
    return KeptTensor(tensor.detach(), tensor._version, call, slot)


NOT_TRACED = "not traced"
"""Why something was not recomputed: nothing of its layer call was seen."""


def _ask(call: LayerCall, slot: Slot, producer: str | None, stays: Stays | None) -> Decision:
    """Return what the policy decides; to keep what stays in any case."""
    decision = call.policy.decide(slot, Situation(call.is_last_run, producer, stays))
    if stays is None or (type(decision) is Keep and stays is Stays.ELSEWHERE):
        return decision
    return Keep(stays)
