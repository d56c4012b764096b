"""What every codec keeps, lossy or not; a new row of CODECS is tested by being there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.bench_codecs import STUDY_CODECS, study_codec
from hf_pyao.engine.codecs import Codec, Encoded
from hf_pyao.engine.codecs.grid import AMAX_FLOOR
from hf_pyao.engine.codecs.grouped import GroupedCodec
from tests.helpers.codec_tensors import FLOATS, bits, tensors

every_codec = pytest.mark.parametrize("name", STUDY_CODECS)
examples = settings(max_examples=60, deadline=None)


def _round_trip(codec: Codec, tensor: torch.Tensor) -> torch.Tensor:
    encoded = codec.encode(tensor)
    return codec.decode(encoded.payload, encoded.spec)


def _encodable(codec: Codec, tensor: torch.Tensor) -> bool:
    """Whether encoding is defined: lossy codecs can encode floats even where it saves nothing."""
    return codec.accepts(tensor) or (not codec.is_lossless and tensor.dtype in FLOATS)


@pytest.mark.thorough
@every_codec
@examples
@given(tensor=tensors())
def test_round_trip_keeps_shape_dtype_and_the_stated_bound(name: str, tensor: torch.Tensor) -> None:
    codec = study_codec(name)
    if not _encodable(codec, tensor):
        return
    decoded = _round_trip(codec, tensor)
    assert (decoded.shape, decoded.dtype) == (tensor.shape, tensor.dtype)
    bound = codec.error_bound(tensor)
    assert (bound.shape, bound.dtype) == (tensor.shape, torch.float64)
    if codec.is_lossless:
        assert torch.equal(bits(decoded), bits(tensor))
        assert not bound.any()
        return
    is_finite = tensor.isfinite()
    assert torch.equal(decoded.isnan(), tensor.isnan())
    assert torch.equal(decoded[tensor.isinf()], tensor[tensor.isinf()])
    assert not bound[~is_finite].any()
    error = (decoded.double() - tensor.double()).abs()
    assert (error <= bound)[is_finite].all()


@pytest.mark.thorough
@pytest.mark.parametrize("name", [n for n in STUDY_CODECS if not study_codec(n).is_lossless])
@examples
@given(tensor=tensors(FLOATS))
def test_relative_error_holds_in_every_group(name: str, tensor: torch.Tensor) -> None:
    codec = study_codec(name)
    assert isinstance(codec, GroupedCodec)
    error = (_round_trip(codec, tensor).double() - tensor.double()).abs()
    error = error.where(tensor.isfinite(), 0.0).reshape(-1)
    magnitude = tensor.double().abs().where(tensor.isfinite(), 0.0).reshape(-1)
    floor = max(AMAX_FLOOR, torch.finfo(tensor.dtype).smallest_normal)
    for start in range(0, tensor.numel(), codec.group_size(tensor.shape)):
        group = slice(start, start + codec.group_size(tensor.shape))
        if magnitude[group].max() >= floor:
            assert error[group].max() <= codec.max_relative_error * magnitude[group].max()


@pytest.mark.thorough
@every_codec
@examples
@given(tensor=tensors())
def test_encode_is_deterministic_and_leaves_no_trace(name: str, tensor: torch.Tensor) -> None:
    codec = study_codec(name)
    if not _encodable(codec, tensor):
        return
    before, version, rng = bits(tensor).clone(), tensor._version, torch.get_rng_state()
    first, second = codec.encode(tensor), codec.encode(tensor)
    codec.decode(first.payload, first.spec)
    assert torch.equal(bits(tensor), before)
    assert tensor._version == version
    assert torch.equal(torch.get_rng_state(), rng)
    for one, other in zip(first.payload, second.payload, strict=True):
        assert torch.equal(bits(one), bits(other))


@pytest.mark.thorough
@every_codec
@examples
@given(tensor=tensors())
def test_payload_is_contiguous_and_smaller(name: str, tensor: torch.Tensor) -> None:
    codec = study_codec(name)
    if not codec.accepts(tensor):
        return
    encoded = codec.encode(tensor)
    raw_bytes = tensor.numel() * tensor.element_size()
    if codec.is_lossless:
        assert encoded.payload_bytes <= raw_bytes
    else:
        assert encoded.payload_bytes < raw_bytes
    if name != "identity":
        assert all(part.is_contiguous() for part in encoded.payload)
    for value in encoded.spec or ():
        assert not isinstance(value, torch.Tensor)


@every_codec
@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool, torch.int64])
def test_ambient_modes_change_nothing(name: str, dtype: torch.dtype) -> None:
    """Hooks run inside autocast, with gradients enabled, and under whatever default dtype."""
    codec = study_codec(name)
    tensor = (torch.randn(5, 96, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    if not codec.accepts(tensor):
        return
    expected = codec.encode(tensor)
    decoded = codec.decode(expected.payload, expected.spec)
    default = torch.get_default_dtype()
    live = tensor.clone().requires_grad_() if dtype.is_floating_point else tensor
    try:
        torch.set_default_dtype(torch.float64)
        with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
            encoded = codec.encode(live)
            again = codec.decode(encoded.payload, encoded.spec)
    finally:
        torch.set_default_dtype(default)
    for one, other in zip(encoded.payload, expected.payload, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(bits(one.detach()), bits(other))
    assert torch.equal(bits(again.detach()), bits(decoded))
    if name != "identity":
        assert not again.requires_grad


@every_codec
@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool, torch.int64])
def test_fake_tensors_are_encoded_to_the_same_shapes(name: str, dtype: torch.dtype) -> None:
    codec = study_codec(name)
    tensor = torch.full((3, 130), 1 + 2**-20 if dtype == torch.float32 else 1).to(dtype)
    if dtype == torch.int64:
        tensor = tensor << 40  # fits nothing smaller: what narrow has to assume of a fake tensor
    if not codec.accepts(tensor):
        return

    def layout(encoded: Encoded) -> list[tuple[torch.Size, torch.dtype]]:
        return [(part.shape, part.dtype) for part in encoded.payload]

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(tensor)
        encoded = codec.encode(fake)
        decoded = codec.decode(encoded.payload, encoded.spec)
    assert layout(encoded) == layout(codec.encode(tensor))
    assert (decoded.shape, decoded.dtype) == (tensor.shape, tensor.dtype)


@pytest.mark.parametrize("name", [n for n in STUDY_CODECS if not study_codec(n).is_lossless])
def test_lossy_codecs_refuse_what_must_stay_exact(name: str) -> None:
    codec = study_codec(name)
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float64):
        assert not codec.accepts(torch.zeros(64, 256, dtype=dtype))
    assert not codec.accepts(torch.zeros(64, 512, 0))
    assert not codec.accepts(torch.zeros(64, 512, 1))  # a norm's mean, or reciprocal deviation
    for dtype in FLOATS:
        assert codec.accepts(torch.zeros(64, 256, dtype=dtype))


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("identity", 1.0),
        ("int8", 0.5 + 4 / 4096),
        ("int8_group", 0.5 + 4 / 256),
        ("int8_tensor", 0.5 + 4 / (2 * 64 * 2048)),
        ("fp8", 0.5 + 4 / 4096),
        ("int4", 0.25 + 4 / 128),
    ],
)
def test_bytes_on_the_link(name: str, ratio: float) -> None:
    tensor = torch.randn(64, 2048).bfloat16()
    assert study_codec(name).encode(tensor).payload_bytes == ratio * 2 * tensor.numel()
