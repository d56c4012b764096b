"""Fused Triton kernels of the codecs: one pass over the data each way.

Import this module only for tensors on a device that Triton can build for: see
:func:`hf_pyao.engine.codecs.backend.kernels_for`. Codes and scales are bit for bit those of the
torch code in ``grouped.py`` and beside it, which says what they mean.

[Note: Same bits as torch]
Every float operation here is one IEEE rounding: division is ``div_rn``, rounding to integers is the
addition of a power of two and a half, and multiplications and additions are not fused. Maxima do
not depend on their order.
"""

# What Triton compiles is not typed Python, and its launches take more arguments than its functions.
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disable-error-code="call-arg,arg-type"

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

from hf_pyao.engine.codecs.grid import AMAX_FLOOR, Grid

_VALUES_PER_PROGRAM = 4096


@triton.jit
def _offsets(num_values, group_size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Groups of this program (ROWS,), offsets of their values (ROWS, COLUMNS), and which exist."""
    groups = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    offsets = groups[:, None] * group_size + columns
    return groups, offsets, (columns < group_size) & (offsets < num_values)


@triton.jit
def _round_to_integer(x):
    """Round half to even, for |x| < 2**22. See [Note: Same bits as torch]."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _round_to_e4m3(x):
    """Return the codes of x, |x| ≤ 480, as int32. See [Note: Rounding to e4m3] in ``fp8.py``."""
    magnitudes = tl.abs(x)
    bits = magnitudes.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = (magnitudes + 16384.0).to(tl.int32, bitcast=True) & 0xF
    codes = tl.where(magnitudes >= 0.015625, normal, small)
    return codes | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def _read_e4m3(codes):
    """Return the levels of int32 codes 0…255 as float32, the code of NaN as 480."""
    magnitudes = codes & 0x7F
    normal = ((magnitudes << 20) + 1006632960).to(tl.float32, bitcast=True)
    levels = tl.where(magnitudes >= 8, normal, magnitudes.to(tl.float32) * 0.001953125)
    # The sign by its bit: some versions of Triton negate zero to zero.
    bits = levels.to(tl.int32, bitcast=True) | ((codes & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _round_to_bfloat16(x):
    """Round to nearest even, still as float32, so that the cast that follows is exact anywhere.

    Triton's interpreter truncates. NaN stays NaN as long as its low 16 bits are zero.
    """
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _encode_kernel(
    values_ptr,
    codes_ptr,
    scales_ptr,
    num_values,
    num_groups,
    group_size,
    num_codes,
    codes_per_group,
    AMAX_FLOOR: tl.constexpr,
    TOP: tl.constexpr,
    TOP_BESIDE_NONFINITE: tl.constexpr,
    NAN: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    groups, offsets, exists = _offsets(num_values, group_size, ROWS, COLUMNS)
    values = tl.load(values_ptr + offsets, mask=exists, other=0.0).to(tl.float32)
    magnitudes = tl.abs(values)
    is_finite = magnitudes < float("inf")  # false for NaN too
    amax = tl.max(tl.where(is_finite, magnitudes, 0.0), axis=1)
    amax = tl.maximum(amax, AMAX_FLOOR)
    is_flagged = tl.max(tl.where(is_finite, 0, 1), axis=1) > 0
    scales = tl.where(is_flagged, amax * (1.0 / TOP_BESIDE_NONFINITE), amax * (1.0 / TOP))
    tl.store(scales_ptr + groups, tl.where(is_flagged, -scales, scales), mask=groups < num_groups)

    denominators = tl.broadcast_to(scales[:, None], (ROWS, COLUMNS))
    scaled = tl.div_rn(tl.where(is_finite, values, 0.0), denominators)
    infinite = tl.where(values > 0, TOP, -TOP)
    scaled = tl.where(magnitudes == float("inf"), infinite, scaled)
    scaled = tl.where(values != values, NAN, scaled)
    if IS_FLOAT:
        codes = _round_to_e4m3(scaled)
    else:
        codes = _round_to_integer(scaled).to(tl.int32)
    if BITS == 4:
        _store_pairs(codes, codes_ptr, num_codes, codes_per_group, ROWS, COLUMNS)
    else:
        tl.store(codes_ptr + offsets, codes.to(codes_ptr.dtype.element_ty), mask=exists)


@triton.jit
def _store_pairs(
    codes, codes_ptr, num_codes, codes_per_group, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Store int32 codes (ROWS, COLUMNS) two to a byte."""
    low, high = tl.split(tl.reshape(codes, (ROWS, COLUMNS // 2, 2)))
    pairs = (low & 15) | ((high & 15) << 4)
    _, offsets, exists = _offsets(num_codes, codes_per_group, ROWS, COLUMNS // 2)
    tl.store(codes_ptr + offsets, pairs.to(tl.uint8), mask=exists)


@triton.jit
def _load_pairs(codes_ptr, num_codes, codes_per_group, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load codes (ROWS, COLUMNS) as int32, with their signs."""
    _, offsets, exists = _offsets(num_codes, codes_per_group, ROWS, COLUMNS // 2)
    pairs = tl.load(codes_ptr + offsets, mask=exists, other=0).to(tl.int32)
    low = (pairs << 28) >> 28
    high = (pairs << 24) >> 28
    return tl.reshape(tl.join(low, high), (ROWS, COLUMNS))


@triton.jit
def _decode_kernel(
    codes_ptr,
    scales_ptr,
    values_ptr,
    num_values,
    num_groups,
    group_size,
    num_codes,
    codes_per_group,
    TOP: tl.constexpr,
    NAN: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    groups, offsets, exists = _offsets(num_values, group_size, ROWS, COLUMNS)
    if BITS == 4:
        levels = _load_pairs(codes_ptr, num_codes, codes_per_group, ROWS, COLUMNS).to(tl.float32)
    else:
        codes = tl.load(codes_ptr + offsets, mask=exists, other=0).to(tl.int32)
        levels = _read_e4m3(codes) if IS_FLOAT else codes.to(tl.float32)
    scales = tl.load(scales_ptr + groups, mask=groups < num_groups, other=1.0)[:, None]
    values = levels * tl.abs(scales)
    is_flagged = scales < 0
    values = tl.where(is_flagged & (levels == TOP), float("inf"), values)
    values = tl.where(is_flagged & (levels == -TOP), float("-inf"), values)
    values = tl.where(levels == NAN, float("nan"), values)
    dtype = values_ptr.dtype.element_ty
    if dtype == tl.bfloat16:
        values = _round_to_bfloat16(values)
    tl.store(values_ptr + offsets, values.to(dtype), mask=exists)


@triton.jit
def _pack_bits_kernel(flags_ptr, packed_ptr, num_values, BYTES: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    bits = tl.arange(0, 8)[None, :]
    sources = offsets[:, None] * 8 + bits
    flags = tl.load(flags_ptr + sources, mask=sources < num_values, other=0)
    packed = tl.sum(tl.where(flags != 0, 1 << bits, 0), axis=1)
    tl.store(packed_ptr + offsets, packed.to(tl.uint8), mask=offsets * 8 < num_values)


@triton.jit
def _unpack_bits_kernel(packed_ptr, flags_ptr, num_values, VALUES: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    exists = offsets < num_values
    packed = tl.load(packed_ptr + offsets // 8, mask=exists, other=0).to(tl.int32)
    flags = (packed >> (offsets % 8).to(tl.int32)) & 1
    tl.store(flags_ptr + offsets, flags.to(tl.uint8), mask=exists)


def encode_groups(
    values: torch.Tensor, group_size: int, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the payload of ``GroupedCodec.encode``: codes and scales of *values*.

    values: (n,) contiguous, floating → codes (ceil(n * bits / 8),), scales (num_groups,) float32.
    """
    num_values = values.numel()
    num_groups = triton.cdiv(num_values, group_size)
    codes = values.new_empty(triton.cdiv(num_values * grid.bits, 8), dtype=grid.code_dtype)
    scales = values.new_empty(num_groups, dtype=torch.float32)
    rows, columns, num_warps = _tile(group_size)
    with _on_device(values):
        _encode_kernel[_grid(num_groups, rows)](
            values,
            codes,
            scales,
            num_values,
            num_groups,
            group_size,
            codes.numel(),
            group_size * grid.bits // 8,
            AMAX_FLOOR=AMAX_FLOOR,
            TOP=grid.top,
            TOP_BESIDE_NONFINITE=grid.top_beside_nonfinite,
            NAN=grid.nan,
            BITS=grid.bits,
            IS_FLOAT=grid.is_float,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=num_warps,
            enable_fp_fusion=False,
        )
    return codes, scales


def decode_groups(
    codes: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    grid: Grid,
    num_values: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Undo :func:`encode_groups`: values (num_values,) of *dtype*."""
    values = codes.new_empty(num_values, dtype=dtype)
    rows, columns, num_warps = _tile(group_size)
    with _on_device(codes):
        _decode_kernel[_grid(scales.numel(), rows)](
            codes,
            scales,
            values,
            num_values,
            scales.numel(),
            group_size,
            codes.numel(),
            group_size * grid.bits // 8,
            TOP=grid.top,
            NAN=grid.nan,
            BITS=grid.bits,
            IS_FLOAT=grid.is_float,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=num_warps,
            enable_fp_fusion=False,
        )
    return values


def pack_bits(flags: torch.Tensor) -> torch.Tensor:
    """(n,) contiguous uint8, zero or not → (ceil(n / 8),) uint8, first value in the lowest bit."""
    num_values = flags.numel()
    packed = flags.new_empty(triton.cdiv(num_values, 8))
    with _on_device(flags):
        _pack_bits_kernel[_grid(num_values, _VALUES_PER_PROGRAM)](
            flags, packed, num_values, BYTES=_VALUES_PER_PROGRAM // 8
        )
    return packed


def unpack_bits(packed: torch.Tensor, num_values: int) -> torch.Tensor:
    """Undo :func:`pack_bits`: (num_values,) uint8 of 0 and 1."""
    flags = packed.new_empty(num_values)
    with _on_device(packed):
        _unpack_bits_kernel[_grid(num_values, _VALUES_PER_PROGRAM)](
            packed, flags, num_values, VALUES=_VALUES_PER_PROGRAM
        )
    return flags


def _tile(group_size: int) -> tuple[int, int, int]:
    """Return groups per program, columns (a power of two ≥ group_size), and warps per program."""
    columns = triton.next_power_of_2(group_size)
    rows = max(1, _VALUES_PER_PROGRAM // columns)
    return rows, columns, max(4, rows * columns // 1024)


def _grid(num_items: int, num_per_program: int) -> tuple[int]:
    return (max(1, -(-num_items // num_per_program)),)  # an empty grid is an error


def _on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make *tensor*'s device the current one: Triton launches there, wherever the data is."""
    if tensor.device.type == "cpu":  # under Triton's interpreter
        return nullcontext()
    return torch.accelerator.device_index(tensor.device.index)
