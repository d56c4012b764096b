"""The codecs' kernels for fake tensors: one operation each way, as on a device that Triton knows.

Plain torch, which is what runs on a CPU, takes some ten operations, and makes copies in float32 on
the way. A step that is simulated for a device must not be charged for that.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library
from torch._subclasses.fake_tensor import FakeTensor

from hf_pyao.engine.codecs.grid import Grid

NAMESPACE = "hf_pyao_simulation"


class OnePassKernels:
    """What :mod:`hf_pyao.engine.codecs.kernels` has, for tensors without values."""

    @staticmethod
    def encode_groups(values: Tensor, group_size: int, grid: Grid) -> tuple[Tensor, Tensor]:
        """Return empty codes and scales; see the kernel of that name."""
        sizes = -(-values.numel() * grid.bits // 8), -(-values.numel() // group_size)
        codes, scales = _kernel([values], sizes, [grid.code_dtype, torch.float32])
        return codes, scales

    @staticmethod
    def decode_groups(
        codes: Tensor, scales: Tensor, _size: int, _grid: Grid, num_values: int, dtype: torch.dtype
    ) -> Tensor:
        """Return empty values; see the kernel of that name."""
        return _kernel([codes, scales], [num_values], [dtype])[0]

    @staticmethod
    def pack_bits(flags: Tensor) -> Tensor:
        """Return empty bytes; see the kernel of that name."""
        return _kernel([flags], [-(-flags.numel() // 8)], [torch.uint8])[0]

    @staticmethod
    def unpack_bits(packed: Tensor, num_values: int) -> Tensor:
        """Return empty flags; see the kernel of that name."""
        return _kernel([packed], [num_values], [torch.uint8])[0]


def kernels_for(tensor: Tensor) -> type[OnePassKernels] | None:
    """Return kernels for a fake tensor; None for a real one, whose values count."""
    return OnePassKernels if isinstance(tensor, FakeTensor) else None


def _kernel(
    inputs: list[Tensor], sizes: Sequence[int], dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """Return empty tensors of so many elements, by one operation that reads *inputs*."""
    _define()
    made: list[Tensor] = getattr(torch.ops, NAMESPACE).codec_kernel(inputs, sizes, dtypes)
    return made


@functools.cache
def _define() -> Any:
    """Define the operation, once per process; it goes when its library goes."""
    make: Any = library.Library
    operations = make(NAMESPACE, "FRAGMENT")
    operations.define("codec_kernel(Tensor[] inputs, int[] sizes, ScalarType[] dtypes) -> Tensor[]")
    operations.impl("codec_kernel", _empty, "CompositeExplicitAutograd")
    return operations


def _empty(inputs: list[Tensor], sizes: list[int], dtypes: list[torch.dtype]) -> list[Tensor]:
    both = zip(sizes, dtypes, strict=True)
    return [inputs[0].new_empty(size, dtype=dtype) for size, dtype in both]
