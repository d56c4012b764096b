"""The ring: when blocks of streamed weights are uploaded, and what the engine tells of a step."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from hf_pyao.engine.transfer.graph_task import NO_TASK, current_graph_task
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.ring_schedule import NUM_SLOTS
from hf_pyao.engine.transfer.transport import LinkTimes
from hf_pyao.engine.weights.blocks import Block, Weight, weights_by_parameter
from hf_pyao.engine.weights.device_slots import DeviceSlot, DeviceSlots
from hf_pyao.engine.weights.figures import UploadFigures
from hf_pyao.engine.weights.masters import thawed_weight
from hf_pyao.engine.weights.on_disk import Span, WeightsInFile
from hf_pyao.engine.weights.read_ahead import ReadAhead
from hf_pyao.engine.weights.reads import WeightReads
from hf_pyao.engine.weights.unrecorded import unrecorded
from hf_pyao.errors import ConflictError

_MOST_EXPECTED = 8
"""Uploads ahead of which blocks on a disk are looked for."""


class _Here(threading.local):
    """State of the calling thread."""

    def __init__(self) -> None:
        self.depth = 0
        """Layers whose forward runs."""
        self.stand_ins: dict[int, torch.Tensor] = {}
        """What is read in place of weights, by the weight's id, while one operation runs."""


@dataclass(frozen=True)
class _InParts:
    """A parameter that is made of streamed tensors."""

    ref: Callable[[], torch.Tensor | None]
    weights: tuple[Weight, ...]
    make: Callable[[Sequence[torch.Tensor]], torch.Tensor]


class WeightRing(WeightReads):
    """Blocks that are streamed through slots on the device.

    Args:
        blocks: in forward order, with their memory.
        blocks_of_layer: by number of the layer, its blocks; empty for a layer that stays.
        link: has the transport.
        device: where the slots are.
        num_slots: how many.
        read_groups: makes what is read in place of a parameter that comes in groups of experts.
        on_forward: called as a forward begins.
        counts: what is counted further; None: anew.
        read_ahead: reads blocks that are on a disk; None: none are.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        blocks_of_layer: Sequence[Sequence[int]],
        link: LinkContext,
        device: torch.device,
        num_slots: int = NUM_SLOTS,
        on_forward: Callable[[], None] = lambda: None,
        counts: UploadFigures | None = None,
        read_groups: Callable[[WeightRing, Weight], Any] | None = None,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        counts = UploadFigures() if counts is None else counts
        slots = DeviceSlots(blocks, num_slots, link, device, counts, read_ahead)
        super().__init__(blocks, slots, num_slots, device, counts)
        self._on_forward = on_forward
        self._read_groups = read_groups
        self._masters = tuple(dict.fromkeys(block.masters for block in blocks))
        counts.pool_bytes = sum(m.all_nbytes for m in self._masters if m.in_file is None)
        counts.staging_bytes = 0 if read_ahead is None else read_ahead.nbytes
        self._read_ahead = read_ahead
        self._counted_before = counts.num_uploads, counts.num_late_uploads
        self._blocks_of_layer = tuple(blocks_of_layer)
        self._weights = weights_by_parameter(blocks)
        self._in_parts: dict[int, _InParts] = {}
        """Parameters that are read as something made of streamed tensors, by ``id``."""
        self._here = _Here()
        self._current_slot: DeviceSlot | None = None
        """That of the block in use."""
        self._spans: dict[int, Sequence[Span]] = {}
        """By block, what is read of its file."""
        converted = [each.converted for each in self._masters if each.converted is not None]
        self._compute = converted[0].compute if converted else None

    @property
    def slot_bytes(self) -> int:
        """Size of each slot."""
        return self._device_slots.nbytes

    @property
    def times(self) -> LinkTimes:
        """What the uploads took, and compute's waits for them."""
        return self._device_slots.times

    # ---- what the model sees -------------------------------------------------------------------

    def streams(self, parameter: object) -> bool:
        """Say whether *parameter* is streamed: then casts of it are known where they are made."""
        return self.weight_of(parameter) is not None or self._parts_of(parameter) is not None

    def read_in_parts(
        self,
        ref: Callable[[], torch.Tensor | None],
        tensors: Sequence[torch.Tensor],
        make: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    ) -> None:
        """Let modules read what *make* makes of the streamed *tensors*, in place of a parameter.

        Args:
            ref: returns the parameter; None once it is gone.
            tensors: its parts on the host.
            make: gets them on the device, in this order.
        """
        weights = [weight for each in tensors if (weight := self.weight_of(each)) is not None]
        self._in_parts[id(ref())] = _InParts(ref, tuple(weights), make)

    def _parts_of(self, parameter: object) -> _InParts | None:
        parts = self._in_parts.get(id(parameter))
        return parts if parts is not None and parts.ref() is parameter else None

    def weight_of(self, parameter: object) -> Weight | None:
        """Return what is streamed of *parameter*; None if nothing is."""
        weight = self._weights.get(id(parameter))
        return weight if weight is not None and weight.ref() is parameter else None

    def read(self, parameter: Parameter | None) -> torch.Tensor | None:
        """Return what a module's attribute gives where *parameter* is in its table.

        Inside of a layer's forward, and in backward: the weight on the device. Elsewhere the
        parameter itself; who asks for it may change it, so that its block is uploaded again.
        """
        weight = self.weight_of(parameter)
        if weight is None:
            parts = self._parts_of(parameter) if self._in_parts else None
            return parameter if parts is None else self._read_parts(parts, parameter)
        stand_ins = self._here.stand_ins
        if stand_ins and id(weight) in stand_ins:
            return stand_ins[id(weight)]
        if self._is_used_here:
            if weight.groups:
                assert self._read_groups is not None
                return self._read_groups(self, weight)  # type: ignore[no-any-return]
            stand_in = None if weight.stand_in is None else weight.stand_in()
            return self.given(weight) if stand_in is None else stand_in
        with self._lock:
            for part in weight.groups or (weight,):
                self.forget(part.block)
                if (in_file := self.blocks[part.block].masters.in_file) is not None:
                    in_file.note_reader()
        return parameter

    def _read_parts(self, parts: _InParts, parameter: torch.Tensor | None) -> torch.Tensor | None:
        if self._is_used_here:
            if parameter is not None and parameter.requires_grad:
                raise thawed_weight(parts.weights[0].name.rpartition(".")[0])
            return parts.make([self.castable(weight) for weight in parts.weights])
        with self._lock:
            for weight in parts.weights:
                self.forget(weight.block)
        return parameter

    @property
    def _is_used_here(self) -> bool:
        """True while the forward of a layer, or a backward pass, runs on this thread."""
        return bool(self._here.depth) or current_graph_task() != NO_TASK

    def tensor_for(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the streamed *tensor* on the device, as :meth:`read` does; None elsewhere."""
        weight = self.weight_of(tensor)
        return self.tensor_of(weight) if weight is not None and self._is_used_here else None

    @contextlib.contextmanager
    def standing_in(self, parameter: object, stand_in: torch.Tensor) -> Iterator[None]:
        """Let the operation that runs read *stand_in* in place of *parameter*."""
        weight = self.weight_of(parameter)
        stand_ins = self._here.stand_ins
        stand_ins[id(weight)] = stand_in
        try:
            yield
        finally:
            stand_ins.pop(id(weight), None)

    @contextlib.contextmanager
    def inside(self, layer: int) -> Iterator[None]:
        """Have layer number *layer* find its weights on the device while its forward runs."""
        here, has_gradients = self._here, torch.is_grad_enabled()
        here.depth += 1
        try:
            with self._lock, unrecorded():
                self._note_autocast()
                self._arrive(self._blocks_of_layer[layer][:1])
                self.ahead()
            yield
        except BaseException:  # an interrupt, it may be, as grad mode was being exchanged
            torch.set_grad_enabled(has_gradients)
            raise
        finally:
            here.depth -= 1

    def stop(self) -> None:
        """Let go of the slots. Graphs that still hold handles bring their blocks again."""
        with self._lock:
            for block in list(self.slots):
                if block is not None:
                    self.forget(block)
            self._current_slot = None
            self._device_slots.release()
            if self._read_ahead is not None:
                self._read_ahead.release()

    def figures(self) -> UploadFigures:
        """Return what the uploads came to. Copies that run still are counted, and not yet timed."""
        counts = self.counts
        num_before, num_late_before = self._counted_before
        counts.num_uploads = num_before + self.num_uploads
        counts.num_late_uploads = num_late_before + self.num_late_uploads
        self._device_slots.collect()
        return counts

    # ---- what the engine asks ------------------------------------------------------------------

    def begin_forward(self, *, trains: bool) -> None:
        """Begin a forward, and let the first blocks come.

        Raises:
            ConflictError: a streamed weight requires gradients by now.
        """
        has_gradients = torch.is_grad_enabled()
        try:
            self._begin_forward(trains)
        except BaseException:  # an interrupt, it may be, as grad mode was being exchanged
            torch.set_grad_enabled(has_gradients)
            raise

    def _begin_forward(self, trains: bool) -> None:
        with self._lock, unrecorded():
            self._on_forward()
            self._note_autocast()
            self._device_slots.collect()
            for masters in self._masters:
                masters.refuse_thawed()
                if masters.in_file is not None:
                    masters.in_file.let_go_of_pages()
            self._forget_changed_on_host()
            self.begin(trains=trains)
            self.current = None
            self.ahead()

    def _note_autocast(self) -> None:
        """Let converted weights be uploaded from the first layer under autocast on."""
        compute = self._compute
        if compute is None or compute.dtype is not None:
            return
        kind = self.device.type
        if torch.is_autocast_enabled(kind) and compute.note(torch.get_autocast_dtype(kind)):
            for held in list(self.slots):
                if held is not None:
                    self.forget(held)

    def forget(self, block: int) -> None:
        """Bring *block* again where it is used next: the host's bytes may have changed."""
        self.blocks[block].masters.may_have_changed()
        super().forget(block)

    def ahead(self) -> None:
        """Upload what is used next, and read ahead what is uploaded after that."""
        super().ahead()
        if self._read_ahead is not None:
            self._read_ahead.expect(self._coming_from_disk(self._read_ahead))

    def _coming_from_disk(
        self, read_ahead: ReadAhead
    ) -> list[tuple[int, WeightsInFile, Sequence[Span]]]:
        """Return the blocks that are read next, as many as have room."""
        found: list[tuple[int, WeightsInFile, Sequence[Span]]] = []
        nbytes = 0
        for block in self.coming(_MOST_EXPECTED):
            in_file = self.blocks[block].masters.in_file
            if in_file is None or any(block == other for other, *_ in found):
                continue
            found.append((block, in_file, self._spans_of(block, read_ahead.piece_bytes)))
            nbytes += self.blocks[block].nbytes
            if nbytes >= read_ahead.nbytes:
                break
        return found

    def _spans_of(self, block: int, piece_bytes: int) -> Sequence[Span]:
        spans = self._spans.get(block)
        if spans is None:
            spans = self._spans[block] = self.blocks[block].spans(piece_bytes)
        return spans

    def refuse_compiled(self) -> None:
        """Refuse to go on in compiled code, which reads weights by itself.

        Raises:
            ConflictError: always.
        """
        raise compiled_by_now("the model, or a layer of it,")

    def begin_backward(self, layer: int) -> None:
        """Bring the block of layer number *layer*, whose backward begins.

        What comes next is left to :meth:`upload_ahead`: the layer's own reloads go before it. Of
        several blocks each comes when it is read, and ahead of that by the order of the schedule.
        """
        with self._lock, unrecorded():
            if not self._has_run_back:
                self._forget_changed_on_host()
            blocks = self._blocks_of_layer[layer]
            if len(blocks) <= 1:
                self._arrive(blocks)

    def stalls_ms(self) -> tuple[float, float]:
        """Return how long forward and backward compute have waited for uploads, in ms."""
        counts = self.figures()
        return counts.stall_forward_ms, counts.stall_backward_ms

    def upload_ahead(self) -> None:
        """Upload what is used next."""
        with self._lock, unrecorded():
            self.ahead()

    # ---- uploads -------------------------------------------------------------------------------

    def upload(self, block: int, slot: int) -> None:
        """Queue the copy of *block* into *slot*; see [Note: Slots]."""
        place = self._device_slots[slot]
        if place is self._current_slot:
            self._current_slot = None
        self._device_slots.upload(block, place)

    def _refuse_write(self, slot: weakref.ref[DeviceSlot], block: int) -> None:
        """Forget what a layer has written into, which is about to be told."""
        with self._lock:
            self.forget(block)
            if (place := slot()) is not None:
                place.let_go_of_views()

    def _arrive(self, blocks: Sequence[int]) -> None:
        if blocks:
            if current_graph_task() == NO_TASK:
                self.blocks[blocks[0]].masters.refuse_thawed()
            self._forget_changed(blocks[0])
            self._bring(blocks[0], goes_ahead=False)
        else:
            self.leave(in_backward=current_graph_task() != NO_TASK)

    def _forget_changed_on_host(self) -> None:
        """Have what is in the slots brought again if it is not what the host has by now."""
        for held in list(self.slots):
            if held is not None and self.blocks[held].has_changed():
                self.forget(held)

    def _forget_changed(self, block: int) -> None:
        if block in self.slots and self.blocks[block].has_new_marks():
            self.forget(block)

    def _bring(self, block: int, *, goes_ahead: bool = True) -> DeviceSlot:
        """Have *block* in a slot, and compute ordered behind its upload; return the slot."""
        if block == self.current and block in self.slots:
            slot = self._device_slots[self.slots.index(block)]
            if slot.is_here:
                return slot
        self._forget_changed(block)
        slot = self._device_slots[self.use(block, in_backward=current_graph_task() != NO_TASK)]
        if not slot.is_here:
            try:
                self._device_slots.await_upload(slot)
            except BaseException:
                super().forget(block)  # it is brought again where it is used next
                raise
            for weight, tensor in self.blocks[block].strays():
                assert slot.storage is not None
                if weight.slot_dtype is not None:
                    plain = weight.view_of(slot.storage, self._blank(weight.slot_dtype))
                    plain.copy_(tensor.detach())
        self._current_slot = slot
        if goes_ahead:
            self.ahead()
        return slot

    def _slot_in_use(self, block: int) -> DeviceSlot | None:
        """Return the slot of *block* if it is in use, and the current stream its home's."""
        slot = self._current_slot
        if slot is None or self.current != block:
            return None
        return slot if slot.is_at_home else None


def compiled_by_now(what: str) -> ConflictError:
    """Return the error for *what*, which was compiled after the weights were put on the host."""
    return ConflictError(
        f"{what} was compiled after it was attached, and its frozen weights are streamed: compiled "
        "code reads weights by itself. Train without torch.compile, or detach and give "
        "stream_weights='off'.",
        key="streaming-compiled",
    )
