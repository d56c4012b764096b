"""The levels to which int8, int4 and fp8 round. See [Note: Scales and codes] in ``grouped``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

AMAX_FLOOR = 2.0**-93
"""Least magnitude that a scale is made of."""

MAX_KERNEL_GROUP = 16384
"""Longest group that one kernel program holds in its registers."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The levels that a scaled value may take. See [Note: Scales and codes] in ``grouped``."""

    bits: int
    """Bits per code: 8 or 4."""
    code_dtype: torch.dtype
    """int8 or uint8."""
    top: float
    """The largest level."""
    top_beside_nonfinite: float
    """The largest level of finite values in a group that also holds NaN or infinities."""
    nan: float
    """What the code for NaN reads as; beyond every level."""
    finest_step: float = 1.0
    """Distance between neighbouring levels around zero."""
    coarsest_step: float = 1.0
    """Distance between neighbouring levels at the top."""
    relative_step: float = 0.0
    """Most that a step measures relative to the value, above the finest; 0 if steps are equal."""

    @property
    def is_float(self) -> bool:
        """Whether the levels are e4m3's, not integers."""
        return self.relative_step > 0
