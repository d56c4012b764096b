"""Four-bit symmetric integers, two to a byte, one scale per 64 values."""

from __future__ import annotations

import torch

from hf_pyao.engine.codecs.grid import Grid
from hf_pyao.engine.codecs.grouped import GroupedCodec

_GRID = Grid(bits=4, code_dtype=torch.uint8, top=7.0, top_beside_nonfinite=6.0, nan=-8.0)


class Int4Codec(GroupedCodec):
    """Symmetric quantisation to 15 levels in groups of 64: 28 % of the bytes of bfloat16.

    Codes are uint8: value *i* is the low half of byte ``i // 2`` if *i* is even, else the high
    half, in two's complement.
    """

    name = "int4"
    grid = _GRID
    num_per_group = 64

    def group_size(self, shape: torch.Size) -> int:
        """Return the group's fixed length."""
        return self.num_per_group

    def to_codes(self, scaled: torch.Tensor) -> torch.Tensor:
        """Round half to even; two values per uint8."""
        levels = scaled.round_().to(torch.int8).view(torch.uint8)
        low, high = levels[:, ::2], levels[:, 1::2]
        return (low & 15).bitwise_or_(high << 4)

    def from_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the levels, which are the halves of each byte, as float32."""
        low = (codes << 4).view(torch.int8) >> 4  # the shift to the right extends the sign
        high = codes.view(torch.int8) >> 4
        return torch.stack((low, high), -1).flatten(1).float()
