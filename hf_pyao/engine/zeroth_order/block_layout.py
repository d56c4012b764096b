"""Blocks whose weights are trained: their parts, and the momentum that travels with them.

A block is the weights of one layer, or some rows of an embedding's or the head's weight. With
momentum its slot has, behind the weights, the float32 momentum of each trained weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hf_pyao.engine.transfer.layout import bytes_view
from hf_pyao.engine.weights.blocks import Block, Weight
from hf_pyao.engine.weights.host_bytes import aligned
from hf_pyao.engine.weights.masters import Masters
from hf_pyao.engine.zeroth_order.trained import TrainedPart, TrainedWeights

_STATE_BYTES = 4
"""Of an element: the momentum is float32."""


class VisitBlock(Block):
    """Weights that come to the device together, and go back where they are trained.

    Args:
        index: its number among the blocks, in forward order.
        masters: the weights on the host.
        trained: all trained weights of the model.
        rows: first row and the one behind the last, where the block is a part of one weight.
    """

    def __init__(
        self,
        index: int,
        masters: Masters,
        trained: TrainedWeights,
        rows: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(index, masters, None if rows is None else [(masters.masters[0], rows)])
        self.trained = list(_parts_of(self, trained))
        """Its trained weights by their place, each with the part of the parameter that it is."""
        self._states: dict[int, int] = {}
        """By place in :attr:`trained`, the first byte of the momentum behind the weights."""
        self.state_memory: torch.Tensor | None = None
        """uint8, on the host, shape (:attr:`state_nbytes`,)."""
        self.state_nbytes = 0
        """Bytes of the momentum."""
        if trained.settings.momentum:
            for place, (_, part) in enumerate(self.trained):
                self._states[place] = self.state_nbytes
                self.state_nbytes += aligned(_STATE_BYTES * part.num_elements)
        self.state_offset = aligned(self.nbytes)
        """First byte of the momentum in the slot."""
        if self.state_nbytes:
            self.nbytes = self.state_offset + self.state_nbytes

    def give_state_memory(self, memory: torch.Tensor) -> None:
        """Let the momentum live in *memory*, from zero on."""
        self.state_memory = memory.zero_()
        for place, (_, part) in enumerate(self.trained):
            part.give_state(self._state_in(memory, place, 0))

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what an upload copies: first byte in the slot, and uint8 bytes on the host."""
        yield from super().pieces()
        if self.state_memory is not None:
            yield self.state_offset, self.state_memory

    def read(
        self, weight: Weight, storage: torch.UntypedStorage, device: torch.device
    ) -> torch.Tensor:
        """Return *weight* as a slot has it."""
        return weight.view_of(storage, device)

    def runs(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what goes back to the host: first byte in the slot, and bytes on the host.

        Trained weights that lie beside each other, apart from the gaps that alignment leaves, are
        one run.
        """
        assert self.memory is not None
        start = first = length = 0
        for weight, _ in self.trained:
            gap = weight.offset - (start + length)
            if length and 0 <= gap < 512 and weight.first_byte - first == weight.offset - start:
                length = weight.offset + weight.nbytes - start
                continue
            if length:
                yield start, self.memory[first : first + length]
            start, first, length = weight.offset, weight.first_byte, weight.nbytes
        if length:
            yield start, self.memory[first : first + length]
        if self.state_memory is not None:
            yield self.state_offset, self.state_memory

    def state_in_slot(
        self, storage: torch.UntypedStorage, device: torch.device, place: int
    ) -> torch.Tensor | None:
        """Return the momentum of the trained weight at *place* in a slot; None without momentum."""
        if place not in self._states:
            return None
        memory = bytes_view(storage, device, 0, self.nbytes)
        return self._state_in(memory, place, self.state_offset)

    def _state_in(self, memory: torch.Tensor, place: int, base: int) -> torch.Tensor:
        first = base + self._states[place]
        nbytes = _STATE_BYTES * self.trained[place][1].num_elements
        return memory[first : first + nbytes].view(torch.float32)


def _parts_of(block: Block, trained: TrainedWeights) -> Iterator[tuple[Weight, TrainedPart]]:
    for weight in sorted(block.weights, key=lambda each: each.offset):
        known = trained.of(weight.ref())
        if known is None:
            continue
        first = 0
        if weight.experts is not None:
            first = weight.experts[0] * (known.num_elements // weight.master.size[0])
        yield weight, known.part_from(first)
