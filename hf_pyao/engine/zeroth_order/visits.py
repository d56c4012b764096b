"""Weights that visit the device: a ring of blocks whose updates go back to the host.

[Note: Visits]
- A block is uploaded ahead of its layer (``transfer/ring_schedule.py``). As the layer begins, its
  trained weights are updated in the slot by the steps that they have not seen, and the copy back to
  the host is queued at once: both passes only read, so that copy runs beside them.
- What a module reads is a new tensor: the weight in the slot plus or minus epsilon times the noise.
  The slot keeps the pristine bits.
- An upload into the slot waits for the copy back from it, and an upload of the block waits for the
  block's own copy back. Both are event waits.
- The number of steps that a weight has seen is raised once the copy back is queued. If anything
  fails before that, the slot is forgotten, the host has the bits of before, and the update is made
  at the next visit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hf_pyao.engine.transfer.layout import bytes_view
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.ring_schedule import NUM_SLOTS, RingSchedule
from hf_pyao.engine.weights.blocks import Block, Weight, weights_by_parameter
from hf_pyao.engine.weights.device_slots import DeviceSlot, DeviceSlots
from hf_pyao.engine.weights.figures import UploadFigures
from hf_pyao.engine.zeroth_order.trained import TrainedWeights


class _Pass(threading.local):
    """What the calling thread is at."""

    sign: int | None = None
    """1 and -1 in a pass of a step, 0 in another forward; None outside of a forward."""

    def __init__(self) -> None:
        self.given: dict[int, torch.Tensor] = {}
        """Perturbed weights that this layer call has read, by the parameter's id."""


class WeightVisits(RingSchedule):
    """Trained and frozen weights as the modules of one model read them.

    Args:
        blocks: those on the host, in forward order, with their memory.
        trained: all trained weights of the model.
        link: transport and compute streams.
        device: where compute runs.
        num_slots: slots of the ring.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        trained: TrainedWeights,
        link: LinkContext,
        device: torch.device,
        num_slots: int = NUM_SLOTS,
    ) -> None:
        super().__init__(len(blocks), num_slots)
        self.device = device
        self.trained = trained
        self.blocks = tuple(blocks)
        self.counts = UploadFigures()
        self.num_offloads = 0
        """Copies of blocks back to the host."""
        self.offloaded_bytes = 0
        """Bytes that they copied."""
        self._transport = link.transport
        self._slots = DeviceSlots(blocks, num_slots, link, device, self.counts)
        self._weights = weights_by_parameter(blocks)
        self._trained_of = [_trained_in(block, trained) for block in blocks]
        self._copies_back: dict[int, list[Any]] = {}
        """By block, the tickets of its newest copy back."""
        self._left_by: list[int | None] = [None] * num_slots
        """By slot, the block whose copy back may still read it."""
        self._seen = [-1] * len(blocks)
        """By block, how many steps its weights have seen."""
        self._pass = _Pass()
        self._lock = threading.RLock()

    # ---- what modules read: a Source of tables -------------------------------------------------

    def streams(self, parameter: object) -> bool:
        """Say whether *parameter* is on the host."""
        return self.weight_of(parameter) is not None

    def weight_of(self, parameter: object) -> Weight | None:
        """Return what is streamed of *parameter*; None if nothing is."""
        weight = self._weights.get(id(parameter))
        return weight if weight is not None and weight.ref() is parameter else None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether *tensor* is one that a pass has read: no parameter of the model."""
        if any(tensor is each for each in self._pass.given.values()):
            return True
        return self._slots.of_storage(tensor.untyped_storage()._cdata) is not None

    def read(self, parameter: Any) -> Any:
        """Return what a module's attribute gives where *parameter* is in its table.

        In a pass the perturbed weight, in another forward the weight, on the device. Elsewhere the
        parameter.
        """
        here = self._pass
        if here.sign is None or parameter is None:
            return parameter
        given = here.given.get(id(parameter))
        if given is not None:
            return given
        with self._lock, torch.no_grad():
            given = self._read(parameter, here.sign)
        if self.streams(parameter) and here.sign:
            here.given[id(parameter)] = given
        return given

    def _read(self, parameter: torch.Tensor, sign: int) -> torch.Tensor:
        streamed, weight = self.weight_of(parameter), self.trained.of(parameter)
        if streamed is not None:
            slot = self._slots[self._arrive(streamed.block)]
            data = self._view(streamed, slot)
        else:
            if weight is not None:
                self._update_in_place(parameter)
            data = parameter.detach()
        return data if weight is None or not sign else self.trained.perturbed(weight, data, sign)

    @contextmanager
    def reading(self, sign: int) -> Iterator[None]:
        """Let modules read on this thread what the pass of *sign* computes with; 0: the weights."""
        here = self._pass
        before, here.sign = here.sign, sign
        try:
            yield
        finally:
            here.sign = before
            here.given.clear()

    def end_layer(self) -> None:
        """Let go of the perturbed weights that a layer call has read on this thread."""
        self._pass.given.clear()

    @property
    def sign(self) -> int | None:
        """That of the pass that the calling thread is in; None outside of one."""
        return self._pass.sign

    # ---- visits --------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a forward, or both forwards of a step."""
        with self._lock, torch.no_grad():
            for held in list(self.slots):
                if held is not None and self.blocks[held].has_changed():
                    self.forget(held)
            self.begin(trains=False)
            self.current = None
            self.ahead()

    def arrive(self, block: int) -> None:
        """Have *block* on the device, updated; and let the next one come."""
        with self._lock, torch.no_grad():
            self._arrive(block)

    def _arrive(self, block: int) -> int:
        number = self.use(block, in_backward=False)
        slot = self._slots[number]
        is_new = not slot.is_here
        if is_new:
            self._slots.await_upload(slot)
        if is_new or self._seen[block] != self.trained.num_steps:
            self.ahead()  # before the update: the next upload need not wait for it
        if self._seen[block] != self.trained.num_steps:
            try:
                self._update(block, number, slot)
            except BaseException:
                self.forget(block)  # the next reader uploads the host's bits again
                self._slots.empty(slot)
                raise
        return number

    def _update(self, block: int, number: int, slot: DeviceSlot) -> None:
        """Update the trained weights in *slot* and queue their copy back; see [Note: Visits]."""
        notes = self._catch_up(block, slot)
        if notes:
            self._copy_back(block, number, slot)
            for note in notes:
                note()
        self._seen[block] = self.trained.num_steps

    def _catch_up(self, block: int, slot: DeviceSlot) -> list[Callable[[], None]]:
        notes = []
        for weight, trained in self._trained_of[block]:
            note = self.trained.catch_up(trained, self._view(weight, slot))
            if note is not None:
                notes.append(note)
        return notes

    def _copy_back(self, block: int, number: int, slot: DeviceSlot) -> None:
        meant = self.blocks[block]
        assert slot.storage is not None
        assert meant.memory is not None
        tickets = []
        for start, first, nbytes in _runs(self._trained_of[block]):
            ticket = self._transport.offload(
                bytes_view(slot.storage, self.device, start, start + nbytes),
                meant.memory[first : first + nbytes],
                label=f"updated weights of {meant.layer!r}",
                times=self._slots.times,
            )
            tickets.append(ticket)
            self.offloaded_bytes += nbytes
        self._copies_back[block] = tickets
        self._left_by[number] = block
        self.num_offloads += 1

    def _view(self, weight: Weight, slot: DeviceSlot) -> torch.Tensor:
        assert slot.storage is not None
        assert weight.slot_dtype is not None
        slot.meet()
        blank = torch.empty(0, dtype=weight.slot_dtype, device=self.device)
        return weight.view_of(slot.storage, blank)

    def upload(self, block: int, slot: int) -> None:
        """Queue the copy of *block* into *slot*, behind the copies back of both."""
        left, self._left_by[slot] = self._left_by[slot], None
        after = list(self._copies_back.get(block, ()))
        if left is not None and left != block:
            after += self._copies_back.get(left, ())
        self._slots.upload(block, self._slots[slot], after=after)

    # ---- the end of a run of steps -------------------------------------------------------------

    def flush(self) -> None:
        """Have every weight updated by all steps, where it lives. The host waits for the copies."""
        with self._lock, torch.no_grad():
            for index, pairs in enumerate(self._trained_of):
                if any(self.trained.is_behind(trained) for _, trained in pairs):
                    self._arrive(index)
            for weight in self.trained.weights:
                parameter = weight.ref()
                if parameter is not None and not self.streams(parameter):
                    self._update_in_place(parameter)
            self.wait_for_copies()

    def _update_in_place(self, parameter: torch.Tensor) -> None:
        weight = self.trained.of(parameter)
        if weight is None or not self.trained.is_behind(weight):
            return
        updated = parameter.detach().clone()
        note = self.trained.catch_up(weight, updated)
        if note is not None:
            parameter.data.copy_(updated)
            note()

    def wait_for_copies(self) -> None:
        """Let the host wait until every copy back has ended."""
        for tickets in self._copies_back.values():
            for ticket in tickets:
                self._transport.retire(ticket)
                while not self._transport.is_done(ticket):
                    time.sleep(1e-4)
        self._copies_back.clear()
        self._left_by = [None] * len(self._left_by)

    def forget_all(self) -> None:
        """Upload every block again: the weights on the host may have changed."""
        with self._lock:
            for held in list(self.slots):
                if held is not None:
                    self.forget(held)

    def stop(self) -> None:
        """Let go of the slots. Copies back have ended then."""
        self.wait_for_copies()
        self.forget_all()
        self._slots.release()

    def figures(self) -> dict[str, Any]:
        """Return what the visits came to, as plain values."""
        self._slots.collect()
        self.counts.num_uploads = self.num_uploads
        self.counts.num_late_uploads = self.num_late_uploads
        self.counts.pool_bytes = sum(masters.all_nbytes for masters in self._masters)
        return {
            **self.counts.as_dict(),
            "num_offloads": self.num_offloads,
            "offloaded_bytes": self.offloaded_bytes,
        }

    @property
    def _masters(self) -> list[Any]:
        return list(dict.fromkeys(block.masters for block in self.blocks))


def _trained_in(block: Block, trained: TrainedWeights) -> list[tuple[Weight, Any]]:
    """Return the trained weights of a block, by their place in it."""
    found = []
    for weight in sorted(block.weights, key=lambda each: each.offset):
        known = trained.of(weight.ref())
        if known is not None:
            found.append((weight, known))
    return found


def _runs(pairs: Sequence[tuple[Weight, Any]]) -> Iterator[tuple[int, int, int]]:
    """Yield the bytes of weights: first byte in the slot, first byte on the host, and size.

    Weights that lie beside each other, apart from the gaps that alignment leaves, are one run.
    """
    start = first = length = 0
    for weight, _ in pairs:
        gap = weight.offset - (start + length)
        if length and 0 <= gap < 512 and weight.first_byte - first == weight.offset - start:
            length = weight.offset + weight.nbytes - start
            continue
        if length:
            yield start, first, length
        start, first, length = weight.offset, weight.first_byte, weight.nbytes
    if length:
        yield start, first, length
