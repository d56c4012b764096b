"""Where streamed weights lie in host memory."""

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


def may_differ(memory: torch.Tensor) -> bool:
    """Say whether this process may have written to a private mapping."""
    try:
        return was_written(memory)
    except OSError:  # the kernel does not tell
        return True
