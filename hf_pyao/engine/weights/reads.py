"""What layers and autograd read of streamed weights: views of slots, casts, and what was saved.

[Note: Saved weights]
- A saved tensor that lies in a slot is known by its storage, and becomes a block and a layout. In
  backward the block is uploaded again, into any slot, and viewed in the same way.
- The cast of a weight has a storage of its own. It is known where it is made, see [Note: Casts of
  weights] in ``castable.py``. Backward makes it again.
"""

from __future__ import annotations

import abc
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_pyao.engine.transfer.layout import Layouts, TensorLayout, has_storage
from hf_pyao.engine.transfer.ring_schedule import RingSchedule
from hf_pyao.engine.weights.blocks import Block, SavedWeight, Weight
from hf_pyao.engine.weights.castable import CastableView, Part, whole_of
from hf_pyao.engine.weights.device_slots import DeviceSlot, DeviceSlots
from hf_pyao.engine.weights.figures import UploadFigures
from hf_pyao.engine.weights.known_casts import CastSource, KnownCasts
from hf_pyao.engine.weights.slot_view import SlotView, lost_write
from hf_pyao.engine.weights.unrecorded import unrecorded
from hf_pyao.errors import ConflictError, warn

logger = logging.getLogger(__name__)

_PLAIN = frozenset({torch.Tensor, SlotView})
_TO_COPY: Callable[..., torch.Tensor] = torch.ops.aten._to_copy.default


class WeightReads(RingSchedule):
    """Gives weights from the slots of a ring, and gives again what autograd has saved of them.

    Args:
        blocks: in forward order, with their memory.
        device_slots: the slots.
        num_slots: how many there are.
        device: where they are.
        counts: what is counted further.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        device_slots: DeviceSlots,
        num_slots: int,
        device: torch.device,
        counts: UploadFigures,
    ) -> None:
        super().__init__(len(blocks), num_slots)
        self.blocks = tuple(blocks)
        self.counts = counts
        """What was counted so far."""
        self.device = device
        """Where the slots are."""
        self._device_slots = device_slots
        self._lock = threading.RLock()  # autograd runs a thread for each device
        self._blanks: dict[torch.dtype, torch.Tensor] = {}
        self._layouts = Layouts()
        self._casts = KnownCasts()
        self._changes_casts: set[str] = set()
        self._has_told_of_stored_reads = False

    # ---- carried out by the ring ---------------------------------------------------------------

    @abc.abstractmethod
    def _bring(self, block: int) -> DeviceSlot:
        """Have *block* in a slot, and compute ordered behind its upload; return the slot."""

    @abc.abstractmethod
    def _slot_in_use(self, block: int) -> DeviceSlot | None:
        """Return the slot of *block* if it is in use, and the current stream its home's."""

    @abc.abstractmethod
    def _refuse_write(self, slot: weakref.ref[DeviceSlot], block: int) -> None:
        """Forget what a layer has written into, which is about to be told."""

    # ---- what layers read ----------------------------------------------------------------------

    def given(self, weight: Weight) -> torch.Tensor:
        """Return what stands for *weight* in a layer: castable where autocast may cast it."""
        kind = self.device.type
        if weight.is_castable and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            if dtype != weight.dtype and (weight.converted is None or dtype == weight.slot_dtype):
                return self.castable(weight)
        return self.tensor_of(weight)

    def castable(self, weight: Weight) -> CastableView:
        """Return *weight* as a view whose casts are known."""
        part = whole_of(weight)
        return CastableView.of(weight, part, self.held(weight, part), self)

    def tensor_of(self, weight: Weight) -> torch.Tensor:
        """Return *weight* on the device, ready for compute on the current stream."""
        if weight.converted is not None:
            return self._stored_copy(weight, whole_of(weight))
        with self._lock:
            slot = self._slot_in_use(weight.block)
            known = None if slot is None else slot.views.get(weight.offset)
            if known is not None:
                return known
        with self._lock, unrecorded():
            slot = self._bring(weight.block)
            view = slot.views.get(weight.offset)
            if view is None:
                assert slot.storage is not None
                plain = weight.view_of(slot.storage, self._blank(weight.dtype))
                on_write = functools.partial(self._refuse_write, weakref.ref(slot), weight.block)
                view = slot.hand_out(SlotView.over(plain, weight, on_write))
            slot.meet()
            return view

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether *tensor* lies in a slot."""
        return self._device_slots.of_storage(tensor.untyped_storage()._cdata) is not None

    def held(self, weight: Weight, part: Part) -> torch.Tensor:
        """Return *part* of *weight* as a plain view of the slot."""
        with self._lock:
            slot = self._slot_in_use(weight.block)
            known = None if slot is None else slot.parts.get((weight, part))
            if known is not None:
                return known.view
        with self._lock, unrecorded():
            slot = self._bring(weight.block)
            assert weight.slot_dtype is not None
            view = slot.part(weight, part, self._blank(weight.slot_dtype))
            slot.meet()
            return view

    def keep(self, weight: Weight, part: Part, held: torch.Tensor) -> torch.Tensor:
        """Return a view that equals *held*, and lives as long as a slot has *weight*."""
        slot = self._device_slots.of_storage(held.untyped_storage()._cdata)
        return held if slot is None else slot.keep(weight, part, held)

    def stored(self, weight: Weight, part: Part, held: torch.Tensor) -> torch.Tensor:
        """Return *part* of *weight* as a plain tensor of the stored dtype."""
        return held if weight.converted is None else self._stored_copy(weight, part)

    def _stored_copy(self, weight: Weight, part: Part) -> torch.Tensor:
        """Return *part* of *weight* in its stored dtype, where that is not what is uploaded."""
        with unrecorded():
            copied = weight.copy_on(self.device, part.size, part.stride, part.offset)
        with self._lock:
            self._casts.note(copied, CastSource(weight, part, None))
            self.counts.num_stored_reads += 1
            self.counts.stored_read_bytes += copied.nbytes
            if not self._has_told_of_stored_reads:
                self._has_told_of_stored_reads = True
                warn(
                    logger,
                    "streamed-weight-cast",
                    "%r is read in its stored dtype (%s), and weights are uploaded in that of "
                    "autocast: each such read copies the weight from the host, and compute waits "
                    "for it. Run the model under autocast, or give stream_dtype='stored'.",
                    weight.name,
                    weight.dtype,
                )
        return copied

    def cast(
        self, weight: Weight, part: Part, held: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Return what ``_to_copy`` with *options* makes of *part* of *weight*."""
        if weight.converted is not None:
            asked = {name: value for name, value in options.items() if value is not None}
            if asked == {"dtype": held.dtype}:
                return held
        cast = _TO_COPY(self.stored(weight, part, held), **options)
        with self._lock:
            self._casts.note(cast, CastSource(weight, part, options))
        return cast

    def data_of(self, weight: Weight) -> torch.Tensor:
        """Return what the weight's ``data`` gives; see [Note: Lost writes].

        Raises:
            ConflictError: it is not uploaded in its stored dtype.
        """
        if weight.converted is not None:
            raise ConflictError(
                f"a layer reads the data of {weight.name!r} ({weight.dtype}) as it runs, and its "
                f"weights are uploaded as {weight.slot_dtype}. Give stream_dtype='stored', and "
                "merge or unmerge adapters outside of forward and backward.",
                key="streamed-weight-cast",
            )
        return self.tensor_of(weight).data

    def refuse_write(self, weight: Weight) -> None:
        """Refuse an operation that writes into *weight*.

        Raises:
            ConflictError: always.
        """
        raise lost_write(weight.name)

    # ---- what autograd has saved ---------------------------------------------------------------

    def find(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Return what gives *tensor* again, if it lies in a slot or in a cast; else None."""
        if type(tensor) is CastableView:
            saved = SavedWeight(tensor.weight)
            return functools.partial(self._stored_again, tensor.weight, tensor.part, saved)
        if type(tensor) not in _PLAIN or not has_storage(tensor):
            return None
        if tensor.is_conj() or tensor.is_neg():
            return None  # which a layout does not tell: the graph holds the slot's memory
        key = tensor.untyped_storage()._cdata
        slot = self._device_slots.of_storage(key)
        if slot is not None:
            if slot.content is None:
                return None
            block, layout = self.blocks[slot.content], self._layouts.of(tensor)
            saved = SavedWeight(block.weight_at(int(tensor.storage_offset()) * tensor.itemsize))
            return functools.partial(self._view_again, block, layout, saved)
        source = self._casts.find(tensor)
        if source is None:
            return None
        if tensor._version:
            self._note_changed_cast(source.weight, tensor.nbytes)
            return None
        saved = SavedWeight(source.weight)
        return functools.partial(self._cast_again, source, self._layouts.of(tensor), saved)

    def _view_again(self, block: Block, layout: TensorLayout, saved: SavedWeight) -> torch.Tensor:
        saved.check()
        with self._lock:
            known = self._slot_in_use(block.index)
            if known is not None and known.storage is not None:
                return layout.view_of(known.storage, 0)
        with self._lock, unrecorded():
            slot = self._bring(block.index)
            assert slot.storage is not None
            view = layout.view_of(slot.storage, 0)
            slot.meet()
            return view

    def _cast_again(
        self, source: CastSource, layout: TensorLayout, saved: SavedWeight
    ) -> torch.Tensor:
        saved.check()
        weight, part = source.weight, source.part
        if weight.converted is not None:
            stored = self._stored_copy(weight, part)
        else:
            stored = self.held(weight, part)
        with unrecorded():
            cast = stored if source.options is None else _TO_COPY(stored, **source.options)
            return layout.view_of(cast.untyped_storage(), 0)

    def _note_changed_cast(self, weight: Weight, nbytes: int) -> None:
        """Count a cast that was changed in place before it was saved; say so once per layer."""
        self.counts.changed_cast_bytes += nbytes
        layer = self.blocks[weight.block].layer
        if layer not in self._changes_casts:
            self._changes_casts.add(layer)
            warn(
                logger,
                "streamed-weight-cast",
                "layer %r changes a cast of the frozen weight %r in place. What it saves of that "
                "cast is treated as an activation (%.3f GiB the first time).",
                layer,
                weight.name,
                nbytes / 2**30,
            )

    def _stored_again(self, weight: Weight, part: Part, saved: SavedWeight) -> torch.Tensor:
        saved.check()
        if weight.converted is not None:
            return self._stored_copy(weight, part)
        return self.held(weight, part)

    def _blank(self, dtype: torch.dtype) -> torch.Tensor:
        blank = self._blanks.get(dtype)
        if blank is None:
            blank = self._blanks[dtype] = torch.empty(0, dtype=dtype, device=self.device)
        return blank
