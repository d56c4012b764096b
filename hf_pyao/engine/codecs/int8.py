"""Eight-bit symmetric integers, one scale per row, per group, or for the whole tensor."""

from __future__ import annotations

from typing import Literal

import torch

from hf_pyao.engine.codecs.grid import MAX_KERNEL_GROUP, Grid
from hf_pyao.engine.codecs.grouped import GroupedCodec

_GRID = Grid(bits=8, code_dtype=torch.int8, top=127.0, top_beside_nonfinite=126.0, nan=-128.0)

_NAMES = {"row": "int8", "tensor": "int8_tensor", "group": "int8_group"}


class Int8Codec(GroupedCodec):
    """Symmetric quantisation to int8 (PyAO paper, section 5.3): about half the bytes of bfloat16.

    *granularity* says which values share a scale:

    - ``"row"``: those of the last dimension; rows longer than 16384 are cut into pieces of that
      length, so that a flat storage does not end up with one scale.
    - ``"group"``: 128 in a row. 3 % more bytes; an outlier coarsens fewer neighbours.
    - ``"tensor"``: all, the coarsest reading of the paper. Plain torch on every device, but for
      the smallest tensors.
    """

    grid = _GRID
    num_per_group = 128

    def __init__(self, granularity: Literal["row", "group", "tensor"] = "row") -> None:
        """Choose which values share a scale."""
        self.granularity = granularity
        self.name = _NAMES[granularity]

    def group_size(self, shape: torch.Size) -> int:
        """Return the length of a row, the group's fixed length, or the number of values."""
        if self.granularity == "group":
            return self.num_per_group
        if self.granularity == "tensor":
            return max(1, shape.numel())
        return min(max(1, shape[-1]), MAX_KERNEL_GROUP) if shape else 1

    def to_codes(self, scaled: torch.Tensor) -> torch.Tensor:
        """Round half to even; one int8 per value."""
        return scaled.round_().to(torch.int8)

    def from_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the codes as float32: they are the levels."""
        return codes.float()
