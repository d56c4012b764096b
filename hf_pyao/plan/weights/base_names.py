"""Names of how a frozen base is stored, and of what adapters are."""

from __future__ import annotations

PLAIN = "bf16"
INT8 = "int8"

_PER_SCALE = 64
_PER_NESTED_SCALE = 256

BASES = {
    PLAIN: 2.0,
    "nf4": 0.5 + 4 / _PER_SCALE,
    "nf4-double": 0.5 + 1 / _PER_SCALE + 4 / (_PER_SCALE * _PER_NESTED_SCALE),
    INT8: 1.0,
}
"""Name -> bytes of a parameter of a linear layer, with its scales (but one a row with int8)."""

ADAPTER_DTYPES = ("float32", "bfloat16")

ALL_LINEAR = "all-linear"
"""PEFT's name for all linear layers but the head."""


def described(base: str) -> str:
    """Return what the title of a report says of *base*; empty for one that is not quantised."""
    return "" if base == PLAIN else f" over {base}"
