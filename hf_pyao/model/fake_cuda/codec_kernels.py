"""The codecs' kernels for fake tensors: one operation each way, as on a device that Triton knows.

Plain torch, which is what runs on a CPU, takes some ten operations, and makes copies in float32 on
the way. A step that is simulated for a device must not be charged for that.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, library
from torch._subclasses.fake_tensor import FakeTensor

from hf_pyao.engine.codecs.grid import Grid

NAMESPACE = "hf_pyao_simulation"

_SCHEMAS = (
    "encode_groups(Tensor values, int num_codes, int num_groups, ScalarType codes)"
    " -> (Tensor, Tensor)",
    "decode_groups(Tensor codes, Tensor scales, int num_values, ScalarType values) -> Tensor",
    "code_bits(Tensor values, int num_codes) -> Tensor",
)


class OnePassKernels:
    """What :mod:`hf_pyao.engine.codecs.kernels` has, for tensors without values."""

    @staticmethod
    def encode_groups(values: Tensor, group_size: int, grid: Grid) -> tuple[Tensor, Tensor]:
        """Return empty codes and scales; see the kernel of that name."""
        num_codes = -(-values.numel() * grid.bits // 8)
        num_groups = -(-values.numel() // group_size)
        codes, scales = _operations().encode_groups(values, num_codes, num_groups, grid.code_dtype)
        return codes, scales

    @staticmethod
    def decode_groups(
        codes: Tensor,
        scales: Tensor,
        group_size: int,
        grid: Grid,
        num_values: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return empty values; see the kernel of that name."""
        values: Tensor = _operations().decode_groups(codes, scales, num_values, dtype)
        return values

    @staticmethod
    def pack_bits(flags: Tensor) -> Tensor:
        """Return empty bytes; see the kernel of that name."""
        packed: Tensor = _operations().code_bits(flags, -(-flags.numel() // 8))
        return packed

    @staticmethod
    def unpack_bits(packed: Tensor, num_values: int) -> Tensor:
        """Return empty flags; see the kernel of that name."""
        flags: Tensor = _operations().code_bits(packed, num_values)
        return flags


def kernels_for(tensor: Tensor) -> type[OnePassKernels] | None:
    """Return kernels for a fake tensor; None for a real one, whose values count."""
    return OnePassKernels if isinstance(tensor, FakeTensor) else None


def _operations() -> Any:
    _define()
    return getattr(torch.ops, NAMESPACE)


@functools.cache
def _define() -> Any:
    """Define the operations, once per process; they go when their library goes."""
    make: Any = library.Library
    operations = make(NAMESPACE, "FRAGMENT")
    for schema, function in zip(_SCHEMAS, (_encode, _decode, _code_bits), strict=True):
        operations.define(schema)
        operations.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    return operations


def _encode(
    values: Tensor, num_codes: int, num_groups: int, codes: torch.dtype
) -> tuple[Tensor, Tensor]:
    return (
        values.new_empty(num_codes, dtype=codes),
        values.new_empty(num_groups, dtype=torch.float32),
    )


def _decode(codes: Tensor, scales: Tensor, num_values: int, values: torch.dtype) -> Tensor:
    return codes.new_empty(num_values, dtype=values)


def _code_bits(values: Tensor, num_codes: int) -> Tensor:
    return values.new_empty(num_codes, dtype=torch.uint8)
