"""The host memory of streamed weights: where it is, and which bytes uploads read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from hf_pyao.engine.stores.private_mapping import was_written
from hf_pyao.engine.transfer.layout import byte_span, bytes_view

ALIGNMENT_BYTES = 512
"""Weights start at multiples of this where they are put together."""

LEAST_ALIGNMENT_BYTES = 64
"""Of weights that stay where they lie; it keeps matrix products bit-identical."""

_MOST_GAPS = 1.02
"""Memory by the bytes of the weights, up to which weights stay where they lie."""


def places_of(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, list[int], int]:
    """Return the host memory that *tensors* lie in together, each one's first byte in it, its size.

    Where they do not lie together, there is no memory: the places are those one behind the other.

    Returns:
        uint8 memory or None; offsets and size in bytes.
    """
    needed = sum(aligned(tensor.nbytes) for tensor in tensors)
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    if len(storages) == 1 and tensors[0].device.type == "cpu":
        storage = tensors[0].untyped_storage()
        spans = [byte_span(tensor) for tensor in tensors]
        start, end = min(first for first, _ in spans), max(last for _, last in spans)
        offsets = [first - start for first, _ in spans]
        most = needed * _MOST_GAPS + 128 * ALIGNMENT_BYTES
        is_aligned = not any(each % LEAST_ALIGNMENT_BYTES for each in (start, *offsets))
        if is_aligned and max(end - start, storage.nbytes()) <= most:
            return bytes_view(storage, tensors[0].device, start, end), offsets, end - start
    return places_in_order(tensors)


def places_in_order(tensors: Sequence[torch.Tensor]) -> tuple[None, list[int], int]:
    """Return the places of *tensors* one behind the other, as :func:`places_of` does."""
    ends = list(itertools.accumulate(aligned(tensor.nbytes) for tensor in tensors))
    return None, [0, *ends[:-1]], ends[-1] if ends else 0


def aligned(nbytes: int) -> int:
    """Return *nbytes*, rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class HostBytes:
    """The memory of weights on the host.

    Args:
        lies_in: the memory that they lie in together already; None: they are to be moved.
    """

    def __init__(self, lies_in: torch.Tensor | None) -> None:
        self.lies_in = lies_in
        self.memory: torch.Tensor | None = None
        """uint8, on the host; None until the weights are to be streamed from there."""
        self._twin: torch.Tensor | None = None

    def stay(self, twin: torch.Tensor | None = None) -> None:
        """Leave the weights where they lie.

        Args:
            twin: the bytes of their whole storage, as they were when the weights came there, for
                uploads to read; None: uploads read the weights' own memory.
        """
        self.memory, self._twin = self.lies_in, twin

    def to_upload(self) -> torch.Tensor:
        """Return the bytes that uploads read: uint8, of the size of :attr:`memory`."""
        assert self.memory is not None
        if self._twin is None:
            return self.memory
        start = int(self.memory.storage_offset())
        same = self._twin[start : start + self.memory.numel()]
        if _may_differ(self.memory) and not torch.equal(same, self.memory):
            self._twin = None  # from now on the weights are this process's own
            return self.memory
        return same


def _may_differ(memory: torch.Tensor) -> bool:
    """Say whether this process may have written to a private mapping."""
    try:
        return was_written(memory)
    except OSError:  # the kernel does not tell
        return True
