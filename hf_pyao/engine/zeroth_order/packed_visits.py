"""Visits of blocks that cross the link in fewer bytes; see [Note: Fewer bytes].

[Note: Packed visits]
- A block's masters are updated on the host before its upload. So a block that was uploaded before
  the end of a step is not what the next step reads: nothing is uploaded across that end.
- As a layer begins in a step, the noise of its block is drawn into the slot, once for both passes,
  and goes back to the host. The masters' update reads it there.
- The host writes packed weights to the memory that the last upload has read and the last copy back
  has written. So it waits for both; they are a whole forward old.
- Noise that is not there (a layer that was left out, a block that was uploaded again) is drawn on
  the host: it has the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from typing import Any

import torch

from hf_pyao.engine.weights.blocks import Weight
from hf_pyao.engine.zeroth_order.device_slots import DeviceSlot
from hf_pyao.engine.zeroth_order.packed_block import PackedBlock
from hf_pyao.engine.zeroth_order.perturbation import CHUNK_ELEMENTS
from hf_pyao.engine.zeroth_order.visits import WeightVisits


class PackedVisits(WeightVisits):
    """As :class:`WeightVisits`, with layers that are :class:`PackedBlock`.

    Embeddings and head that visit by rows travel as they are.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._rounded_too: Collection[int] = frozenset()
        self._noise_in_slot: dict[int, int] = {}
        """By block, the step whose noise is in its slot."""
        self._uploads: dict[int, list[Any]] = {}
        """By block, the tickets of its newest upload."""

    def round_too(self, matrices: Collection[int]) -> None:
        """Read *matrices*, by ``id``, as if they had travelled: those of layers that stay."""
        self._rounded_too = matrices

    def _packed(self, block: int) -> PackedBlock | None:
        found = self.blocks[block]
        return found if isinstance(found, PackedBlock) else None

    # ---- reads ---------------------------------------------------------------------------------

    def _read(
        self, parameter: torch.Tensor, streamed: Weight | None, sign: int, module: str
    ) -> torch.Tensor:
        meant = None if streamed is None else self._packed(streamed.block)
        trained = self.trained.of(parameter)
        if streamed is None and id(parameter) in self._rounded_too:
            self._update_in_place(parameter)
            assert self.trained.format is not None
            data = self.trained.format.rounded(parameter.detach())
            if trained is None or not sign:
                return data
            return self.trained.perturbed(trained, data, sign)
        if streamed is None or meant is None:
            return super()._read(parameter, streamed, sign, module)
        slot = self._slots[self._arrive(streamed.block)]
        assert slot.storage is not None
        slot.meet()
        data = meant.unpacked(slot.storage, self.device, streamed)
        if trained is None or not sign:
            return data
        memory = meant.noise_in_slot(slot.storage, self.device, streamed)
        draw = meant.draw_from(streamed, memory)
        return self.trained.perturbed(trained, data, sign, draw=draw)

    # ---- visits --------------------------------------------------------------------------------

    def _upcoming(self) -> Iterator[int]:
        """Yield the blocks that this forward is still to read; see [Note: Packed visits]."""
        yield from self._orders[self._trains][self._position :]

    def _is_stale(self, block: int) -> bool:
        meant = self._packed(block)
        is_behind = meant is not None and any(
            self.trained.is_behind(part) for _, part in meant.trained
        )
        return is_behind or super()._is_stale(block)

    def _arrive(self, block: int) -> int:
        meant = self._packed(block)
        if meant is None:
            return super()._arrive(block)
        number = self.use(block, in_backward=False)
        slot = self._slots[number]
        is_new = not slot.is_here
        if is_new:
            self._slots.await_upload(slot)
        step = self.trained.num_steps
        draws = bool(self.sign and meant.trained) and self._noise_in_slot.get(block) != step
        if is_new or draws:
            self.ahead()
        if draws:
            try:
                self._draw_noise(meant, number, slot)
            except BaseException:
                self.forget(block)
                self._slots.empty(slot)
                raise
        return number

    def _draw_noise(self, meant: PackedBlock, number: int, slot: DeviceSlot) -> None:
        """Draw the noise of this step into *slot*, and queue its copy back."""
        block, step, form = meant.index, self.trained.num_steps, self.trained.format
        assert form is not None
        assert slot.storage is not None
        self._noise_in_slot.pop(block, None)
        slot.meet()
        for ticket in self._copies_back.get(block, ()):
            self._transport.wait(ticket)  # it reads the noise of the step before
        size = form.noise_itemsize
        for weight, part in meant.trained:
            memory = meant.noise_in_slot(slot.storage, self.device, weight)
            for first in range(0, part.num_elements, CHUNK_ELEMENTS):
                end = min(first + CHUNK_ELEMENTS, part.num_elements)
                z = self.trained.draw(part.key, step, first, end, self.device)
                form.pack_noise(z, memory[size * first : size * end])
        self._noise_in_slot[block] = step
        meant.note_noise(None)
        try:
            self._copy_back(block, number, slot)
        except BaseException:
            # An interrupt: a copy may be queued whose ticket no one has. One behind it is known.
            self._transport.retire_all()
            self._copy_back(block, number, slot)
            raise
        meant.note_noise(step)

    def upload(self, block: int, slot: int) -> None:
        """Update the masters of *block*, pack them, and queue the copy into *slot*."""
        meant = self._packed(block)
        if meant is not None:
            self._noise_in_slot.pop(block, None)
            if meant.has_changed():
                meant.note_change()
            self._update_masters(meant)
            if not meant.is_filled:
                self._wait_for_memory(block)
                meant.fill()
        super().upload(block, slot)
        if meant is not None:
            self._uploads[block] = list(self._slots[slot].tickets)

    def _bring_up_to_date(self, block: int) -> None:
        meant = self._packed(block)
        if meant is None:
            super()._bring_up_to_date(block)
            return
        self._update_masters(meant)
        self.forget(block)

    def _update_masters(self, meant: PackedBlock) -> None:
        """Update the weights on the host by the steps that they have not seen."""
        behind = [(w, part) for w, part in meant.trained if self.trained.is_behind(part)]
        if not behind:
            return
        self._wait_for_memory(meant.index)
        meant.note_update()
        for weight, _ in behind:
            parameter = weight.ref()
            if parameter is not None:
                self._update_in_place(parameter, draw=meant.draw_from(weight))

    def _wait_for_memory(self, block: int) -> None:
        """Let the host wait until no copy reads or writes the block's memory."""
        self.wait_for_copies(block)
        for ticket in self._uploads.pop(block, ()):
            self._transport.retire(ticket)
            while not self._transport.is_done(ticket):
                time.sleep(1e-4)

    def stop(self) -> None:
        """Let go of the slots."""
        for block in list(self._uploads):
            self._wait_for_memory(block)
        super().stop()

    def figures(self) -> dict[str, Any]:
        """Return what the visits came to, as plain values."""
        found = super().figures()
        packed = [block for block in self.blocks if isinstance(block, PackedBlock)]
        found["host_bytes"] += sum(block.packed_nbytes for block in packed)
        return found
