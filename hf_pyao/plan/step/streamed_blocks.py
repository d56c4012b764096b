"""Layers whose frozen weights are not on the device: they are uploaded when a pass needs them.

A block is what one upload brings: the frozen weights of one layer. A layer with fused experts has
several, where these are large: one of all other weights, and one of each group of experts. Blocks
share a ring of slots on the device, each as large as the largest of them. The host has the master
copy of each, so that nothing is ever copied back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hf_pyao.engine.transfer.ring_schedule import NUM_SLOTS


class WeightBlock(NamedTuple):
    """What one upload brings."""

    nbytes: int
    """Alignment of its weights included."""
    experts: int = 0
    """As :attr:`~hf_pyao.plan.step.step_program.Resident.experts`; 0: it has no group of them."""
    first: int = 0
    """First expert of the group."""
    last: int = 0
    """The one behind the last."""


LayerBlocks = tuple[WeightBlock, ...]
"""Blocks of one layer, in the order in which its forward reads them."""


@dataclass(frozen=True)
class StreamedBlocks:
    """The blocks that are streamed."""

    layer_blocks: tuple[LayerBlocks, ...] = ()
    """Of each layer of the model, by position; empty for one whose weights stay. Empty: those of
    all layers do."""
    layer_bytes: tuple[int, ...] = ()
    """Of each layer, the memory that its streamed weights take on the host, as they are stored."""
    disk_layers: tuple[int, ...] = ()
    """Those of the layers whose weights are on a disk."""
    staging_bytes: int = 0
    """Host memory that these are read into: as much may be read ahead of its use."""

    def __bool__(self) -> bool:
        """Return whether any block is streamed."""
        return any(self.layer_blocks)

    def __contains__(self, layer: int) -> bool:
        """Return whether the weights of *layer* are streamed."""
        return 0 <= layer < len(self.layer_blocks) and bool(self.layer_blocks[layer])

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose weights are streamed, in forward order."""
        return tuple(layer for layer, blocks in enumerate(self.layer_blocks) if blocks)

    @property
    def blocks(self) -> tuple[tuple[int, WeightBlock], ...]:
        """All blocks, in forward order, each with its layer."""
        return tuple(
            (layer, block) for layer, blocks in enumerate(self.layer_blocks) for block in blocks
        )

    @property
    def host_bytes(self) -> int:
        """Page-locked bytes on the host: masters, and what is read from a disk."""
        return sum(self.layer_bytes) - self.disk_bytes + self.staging_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the weights that are on a disk."""
        return sum(self.layer_bytes[layer] for layer in self.disk_layers)

    @property
    def num_slots(self) -> int:
        """Slots of the ring."""
        return min(NUM_SLOTS, len(self.blocks))

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: of the largest block."""
        return max((block.nbytes for _, block in self.blocks), default=0)

    @property
    def device_bytes(self) -> int:
        """Bytes of the ring."""
        return self.num_slots * self.slot_bytes

    @property
    def saved_bytes(self) -> int:
        """By how much the device has less than with all weights resident."""
        return sum(self.layer_bytes) - self.device_bytes


NOTHING_STREAMED = StreamedBlocks()
