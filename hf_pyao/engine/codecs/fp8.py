"""Eight-bit floats (e4m3), one scale per row."""

from __future__ import annotations

import torch

from hf_pyao.engine.codecs.grid import MAX_KERNEL_GROUP, Grid
from hf_pyao.engine.codecs.grouped import GroupedCodec

_GRID = Grid(
    bits=8,
    code_dtype=torch.uint8,
    top=448.0,
    top_beside_nonfinite=416.0,
    nan=480.0,  # what 0x7F, e4m3's NaN, would be if it were a number
    finest_step=2.0**-9,
    coarsest_step=32.0,
    relative_step=2.0**-3,
)


class Fp8Codec(GroupedCodec):
    """Eight-bit floats, 4 exponent and 3 mantissa bits, scaled so that each row fills the range.

    Small values keep about 4 significant bits where int8 rounds them away; large ones are coarser
    than int8's. Codes are uint8 with the bits of ``torch.float8_e4m3fn``, rounded to nearest even
    by integer arithmetic: casts differ between devices, and older GPUs have none.
    """

    name = "fp8"
    grid = _GRID

    def group_size(self, shape: torch.Size) -> int:
        """Return the length of a row, at most 16384."""
        return min(max(1, shape[-1]), MAX_KERNEL_GROUP) if shape else 1

    def to_codes(self, scaled: torch.Tensor) -> torch.Tensor:
        """Round to e4m3; one uint8 per value. Magnitudes reach 480 at most.

        See [Note: Rounding to e4m3].
        """
        magnitudes = scaled.abs()
        # [Note: Rounding to e4m3]
        # From 2**-6 on, e4m3 is float32 with 20 mantissa bits fewer: round those off in the bit
        # pattern (a carry into the exponent is right), then move the exponent's bias from 127 to 7.
        bits = magnitudes.view(torch.int32)
        normal = (bits >> 20).bitwise_and_(1).add_(bits).add_(0x7FFFF)
        normal.bitwise_right_shift_(20).sub_(120 << 3)
        # Below, e4m3 is the multiples of 2**-9, the float32 spacing just above 2**14: adding 2**14
        # rounds to one, and leaves its number in the low bits.
        small = (magnitudes + 2.0**14).view(torch.int32).bitwise_and_(0xF)
        codes = normal.where(magnitudes >= 2.0**-6, small)
        signs = scaled.view(torch.int32).bitwise_right_shift_(24).bitwise_and_(0x80)
        return codes.bitwise_or_(signs).to(torch.uint8)

    def from_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the levels as float32, the code of NaN as 480."""
        magnitudes = (codes & 0x7F).int()
        normal = (magnitudes << 20).add_(120 << 23).view(torch.float32)
        levels = normal.where(magnitudes >= 8, magnitudes * 2.0**-9)
        return levels.copysign_(codes.view(torch.int8))
