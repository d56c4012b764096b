"""Layers whose frozen weights are not on the device: they are uploaded when a pass needs them.

A block is the frozen weights of one layer. Streamed blocks share a ring of slots on the device,
each as large as the largest of them. The host has the master copy of each, so that nothing is ever
copied back.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_pyao.engine.transfer.ring_schedule import NUM_SLOTS


@dataclass(frozen=True)
class StreamedBlocks:
    """The blocks that are streamed."""

    layer_bytes: tuple[int, ...] = ()
    """What is uploaded for each layer of the model, by position; 0: its weights stay. Empty: those
    of all layers do."""

    def __bool__(self) -> bool:
        """Return whether any block is streamed."""
        return any(self.layer_bytes)

    def __contains__(self, layer: int) -> bool:
        """Return whether the block of *layer* is streamed."""
        return 0 <= layer < len(self.layer_bytes) and self.layer_bytes[layer] > 0

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose blocks are streamed, in forward order."""
        return tuple(layer for layer, nbytes in enumerate(self.layer_bytes) if nbytes)

    @property
    def host_bytes(self) -> int:
        """Page-locked bytes of the masters on the host."""
        return sum(self.layer_bytes)

    @property
    def num_slots(self) -> int:
        """Slots of the ring."""
        return min(NUM_SLOTS, len(self.layers))

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: of the largest block."""
        return max(self.layer_bytes, default=0)

    @property
    def device_bytes(self) -> int:
        """Bytes of the ring."""
        return self.num_slots * self.slot_bytes

    @property
    def saved_bytes(self) -> int:
        """By how much the device has less than with all blocks resident."""
        return self.host_bytes - self.device_bytes


NOTHING_STREAMED = StreamedBlocks()
