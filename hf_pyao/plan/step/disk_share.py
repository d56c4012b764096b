"""Which streamed layers have their weights on a disk, and how much is read ahead of its use."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hf_pyao.engine.stores.disk_blocks import CHUNK_BYTES, padded
from hf_pyao.engine.stores.disk_files import PAGE_BYTES
from hf_pyao.engine.transfer.ring_schedule import resident_layers
from hf_pyao.plan.step.step_program import StepProgram

FREE_HOST_SHARE = 0.3
"""Share of the host memory that is left for activations where the weights do not all fit."""

MOST_STAGING_BYTES = 512 * 2**20
"""Most host memory that blocks are read into."""

LEAST_STAGING_BYTES = 64 * 2**20
"""Host memory that small blocks are read into, where there is room: several of them ahead."""

_MOST_PIECE_BYTES = 8 * 2**20
"""Bytes of one read. Several pieces are read at once: small ones, so that the drive always has
reads while others are checked and copied."""

_STAGING_SHARE = 4
"""The host memory is at least so many times what blocks are read into, if that can be."""


@dataclass(frozen=True, kw_only=True)
class DiskShare:
    """What is on the disk."""

    layers: tuple[int, ...] = ()
    """Positions among the streamed layers, or all of the model; the others are on the host."""
    piece_bytes: int = 0
    """Host memory that is read into, and copied from, at a time."""
    num_pieces: int = 0

    @property
    def staging_bytes(self) -> int:
        """Host memory that blocks are read into: this much may be read ahead of its use."""
        return self.num_pieces * self.piece_bytes

    @property
    def reserved_bytes(self) -> int:
        """The same, with what aligning it takes."""
        return self.staging_bytes + PAGE_BYTES if self.num_pieces else 0

    def of(self, program: StepProgram) -> StepProgram:
        """Return *program*, a step with streamed blocks, with these of all layers on the disk."""
        layers = tuple(layer for layer in self.layers if layer in program.streamed)
        if not layers:
            return program
        streamed = dataclasses.replace(
            program.streamed, disk_layers=layers, staging_bytes=self.reserved_bytes
        )
        return dataclasses.replace(program, streamed=streamed)

    def among(self, numbers: Sequence[int]) -> DiskShare:
        """Return the same with positions among all layers; *numbers*: those of the streamed."""
        return dataclasses.replace(self, layers=tuple(numbers[each] for each in self.layers))


NOTHING_ON_DISK = DiskShare()


def disk_share(
    layer_bytes: Sequence[int], room_bytes: float, *, largest_bytes: int = 0
) -> DiskShare:
    """Return which layers are on the disk: none if all fit in host memory, or as few as are needed.

    Layers on the host are evenly spread among the others, so that a read has about the same time
    before each block that needs one. Reads go ahead by twice the largest block
    (:data:`LEAST_STAGING_BYTES` if that is more), by :data:`MOST_STAGING_BYTES`, or by a quarter of
    the host memory, whichever is least.

    Args:
        layer_bytes: what the weights of each streamed layer take on the host.
        room_bytes: host memory for them and for activations.
        largest_bytes: of the largest block, where layers have several; 0: a layer is one block.
    """
    if not layer_bytes or sum(layer_bytes) <= room_bytes:
        return NOTHING_ON_DISK
    largest_bytes = largest_bytes or max(layer_bytes)
    piece_bytes = _piece_bytes(largest_bytes)
    wanted = max(2 * largest_bytes, LEAST_STAGING_BYTES)
    wanted = min(wanted, MOST_STAGING_BYTES, int(room_bytes / _STAGING_SHARE))
    num_pieces = max(2, wanted // piece_bytes)
    left = (1 - FREE_HOST_SHARE) * room_bytes - num_pieces * piece_bytes - PAGE_BYTES
    number = len(layer_bytes)
    for num_on_host in range(number - 1, -1, -1):
        on_host = resident_layers(number, num_on_host) if num_on_host else ()
        if sum(layer_bytes[layer] for layer in on_host) <= left or not num_on_host:
            break
    layers = tuple(layer for layer in range(number) if layer not in on_host)
    return DiskShare(layers=layers, piece_bytes=piece_bytes, num_pieces=num_pieces)


def with_blocks_on_disk(program: StepProgram, room_bytes: float) -> StepProgram:
    """Return *program* with as many streamed layers on a disk as the host has no room for.

    Args:
        program: a step with streamed blocks, all of them on the host.
        room_bytes: host memory for weights and activations.
    """
    streamed = program.streamed
    layers = streamed.layers
    share = disk_share(
        [streamed.layer_bytes[layer] for layer in layers],
        room_bytes,
        largest_bytes=streamed.slot_bytes,
    )
    return share.among(layers).of(program)


def _piece_bytes(largest_bytes: int) -> int:
    """Return the bytes of a piece: whole checksums, and no more than the largest block needs."""
    if largest_bytes <= CHUNK_BYTES:
        return padded(largest_bytes)
    chunks = -(-largest_bytes // CHUNK_BYTES) + 1  # a block need not begin at a checksum's first
    return min(chunks * CHUNK_BYTES, _MOST_PIECE_BYTES)
