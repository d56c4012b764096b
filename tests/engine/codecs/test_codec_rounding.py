"""Codes, scales and layouts against references that never saw our code."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bench.bench_codecs import study_codec
from hf_pyao.engine.codecs import get_codec
from hf_pyao.engine.codecs.base import flatten
from hf_pyao.engine.codecs.fp8 import Fp8Codec
from hf_pyao.engine.codecs.grid import AMAX_FLOOR
from tests.helpers.codec_tensors import bits


def _round_trip(name: str, tensor: torch.Tensor) -> torch.Tensor:
    codec = study_codec(name)
    encoded = codec.encode(tensor)
    return codec.decode(encoded.payload, encoded.spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "axis_shape"),
    [("int8", (12, 300)), ("int8_group", (28, 128)), ("int8_tensor", (1, 3600))],
)
def test_int8_is_textbook_symmetric_quantisation(
    name: str, axis_shape: tuple[int, int], dtype: torch.dtype
) -> None:
    tensor = torch.randn(12, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    tensor = tensor.reshape(-1)[: math.prod(axis_shape)].view(axis_shape)
    codes, scales = study_codec(name).encode(tensor).payload
    values = tensor.float().numpy()
    expected_scales = np.abs(values).max(1) * np.float32(1 / 127)
    assert np.array_equal(scales.numpy(), expected_scales)
    expected = np.clip(np.rint(values / expected_scales[:, None]), -127, 127)
    assert np.array_equal(codes.numpy().reshape(axis_shape), expected)
    decoded = _round_trip(name, tensor)
    assert torch.equal(decoded, torch.from_numpy(expected * expected_scales[:, None]).to(dtype))


def test_nonfinite_values_survive_in_place_and_their_neighbours_keep_precision() -> None:
    tensor = torch.tensor([[1.0, math.nan, -math.inf, math.inf, -126.0, 63.0]])
    decoded = _round_trip("int8", tensor)
    assert torch.equal(decoded.nan_to_num(nan=7.0, posinf=8.0, neginf=9.0).round().long(),
                       torch.tensor([[1, 7, 9, 8, -126, 63]]))  # fmt: skip
    codes, scales = get_codec("int8").encode(tensor).payload
    assert codes.tolist() == [1, -128, -127, 127, -126, 63]
    assert scales.item() < 0


@pytest.mark.parametrize("name", ["int8", "int8_group", "int8_tensor", "int4", "fp8"])
def test_extremes(name: str) -> None:
    top = torch.finfo(torch.float32).max
    for fill in (top, math.nextafter(top, 0.0), 2.0**-126, 2.0**-149, 0.0):
        tensor = torch.full((3, 128), fill)
        tensor[1] *= -1
        tensor[2, 5] = math.inf  # the scale is then that of a group with an infinity
        decoded = _round_trip(name, tensor)
        assert torch.equal(decoded.isinf(), tensor.isinf())
        if fill > 1:
            assert torch.allclose(decoded[:2], tensor[:2], rtol=1e-6)
        else:
            assert not decoded[:2].any()
    at_the_floor = torch.full((2, 128), AMAX_FLOOR)
    assert torch.allclose(_round_trip(name, at_the_floor), at_the_floor, rtol=1e-6, atol=0.0)


def test_flushing_denormals_changes_no_code() -> None:
    """Some devices flush; codes must not depend on it."""
    tensor = torch.randn(4, 64) * 1e-39
    tensor[1] *= 1e9
    tensor[2, 0] = 1e-30
    names = ("int8", "int4", "fp8")
    expected = [study_codec(name).encode(tensor).payload for name in names]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        flushed = [study_codec(name).encode(tensor).payload for name in names]
    finally:
        torch.set_flush_denormal(False)
    for (codes, scales), (flushed_codes, flushed_scales) in zip(expected, flushed, strict=True):
        assert torch.equal(codes, flushed_codes)
        assert torch.equal(scales, flushed_scales)


def _e4m3_probes() -> torch.Tensor:
    """Every e4m3 number, every midpoint, their float32 neighbours, and random values."""
    levels = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    levels = levels[levels.isfinite()].unique()
    exact = torch.cat((levels, (levels[1:] + levels[:-1]) / 2))
    around = [exact.nextafter(torch.tensor(side)) for side in (math.inf, -math.inf)]
    scattered = torch.randn(4096) * torch.logspace(-4, 2, 4096)
    return torch.cat((exact, *around, scattered)).clamp(-448, 448)


def test_e4m3_rounding_equals_the_cast_of_torch() -> None:
    probes = _e4m3_probes()
    expected = probes.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(Fp8Codec().to_codes(probes.clone()[None])[0], expected)


def test_bitmask_packs_as_numpy_does() -> None:
    flags = torch.rand(7, 33) < 0.5
    encoded = get_codec("bitmask").encode(flags)
    expected = np.packbits(flags.numpy().reshape(-1), bitorder="little")
    assert np.array_equal(encoded.payload[0].numpy(), expected)


def test_bitmask_reads_any_nonzero_byte_as_true() -> None:
    odd = torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool)
    decoded = _round_trip("bitmask", odd)
    assert decoded.view(torch.uint8).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (torch.randn(50).bfloat16().float(), torch.bfloat16),
        (torch.randn(50).half().float(), torch.float16),
        (torch.randn(50).half().double(), torch.float16),
        (torch.randn(50).double().float().double(), torch.float32),
        (torch.tensor([1.0, 1 + 2**-20]), torch.float32),
        (torch.tensor([-0.0, 1.0, math.inf, -math.inf]), torch.bfloat16),
        (torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32), torch.float32),
        (torch.tensor([127, -128]), torch.int8),
        (torch.tensor([128, 0]), torch.int16),
        (torch.tensor([-(2**15) - 1]), torch.int32),
        (torch.tensor([2**31]), torch.int64),
        (torch.tensor([300], dtype=torch.int32), torch.int16),
        (torch.empty(0), torch.bfloat16),
    ],
)
def test_narrow_finds_the_smallest_exact_dtype(values: torch.Tensor, expected: torch.dtype) -> None:
    encoded = study_codec("narrow").encode(values)
    assert encoded.payload[0].dtype == expected
    assert torch.equal(bits(_round_trip("narrow", values)), bits(values))


@pytest.mark.parametrize("name", ["int8", "fp8", "narrow"])
def test_negative_views_are_read_as_what_they_show(name: str) -> None:
    expected = -torch.arange(64.0)
    shown = torch._neg_view(torch.arange(64.0))  # what the imaginary part of a conjugate is
    assert shown.is_neg()
    assert not flatten(shown).is_neg()  # kernels read the memory as it lies
    assert torch.equal(_round_trip(name, shown), _round_trip(name, expected))
