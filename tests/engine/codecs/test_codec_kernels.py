"""The Triton kernels give the bits of plain torch: under Triton's interpreter, and on a GPU.

Whether Triton interprets is settled when it is imported, so each mode has a process of its own.
They are thorough: of all that tests need, Triton takes longest to install, so that `dev` alone has it.
Where it is missing, they are not run, and say so.
"""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from bench.bench_codecs import study_codec
from hf_pyao.engine.codecs import backend
from hf_pyao.engine.codecs.base import flatten
from hf_pyao.engine.codecs.bitmask import _pack_bits, _unpack_bits
from hf_pyao.engine.codecs.grid import MAX_KERNEL_GROUP
from hf_pyao.engine.codecs.grouped import GroupedCodec, GroupedSpec
from tests.gpu.device import no_host_waits
from tests.helpers.codec_tensors import FLOATS, bits, tensors

GROUPED = ["int8", "int8_group", "int8_tensor", "int4", "fp8"]
examples = settings(max_examples=25, deadline=None)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="not run: Triton is not installed (on Linux: pip install 'hf_pyao[dev]')",
)

Kernels = Callable[..., object]


def _one_thread() -> None:
    torch.set_num_threads(1)


def _call(name: str, *args: object) -> object:
    """Call a function of the kernels' module; runs in the worker process."""
    return getattr(importlib.import_module("hf_pyao.engine.codecs.kernels"), name)(*args)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Kernels]:
    """Call ``kernels.<name>(*args)`` on CPU tensors, in a process where Triton interprets.

    The process begins with the variable: Triton reads it as it is imported, which other packages do.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(_one_thread).result()
        yield lambda *call: pool.submit(_call, *call).result()


@pytest.fixture
def triton_device() -> str:
    """The accelerator, if it is one that Triton compiles for; there its kernels must work."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    if device.type not in ("cuda", "xpu"):
        pytest.skip(f"needs Triton, which has no backend for {device.type}")
    return str(device)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, except that one NaN is as good as another."""
    one, other = one.cpu(), other.cpu()
    if not one.is_floating_point():
        return one.dtype == other.dtype and torch.equal(one, other)
    same_nans = torch.equal(one.isnan(), other.isnan())
    return same_nans and torch.equal(bits(one.nan_to_num(nan=0.0)), bits(other.nan_to_num(nan=0.0)))


def _assert_same_as_torch(name: str, tensor: torch.Tensor, kernels: Kernels, device: str) -> None:
    codec = study_codec(name)
    assert isinstance(codec, GroupedCodec)
    encoded = codec.encode(tensor)
    codes, scales = encoded.payload
    spec: GroupedSpec = encoded.spec
    decoded = codec.decode(encoded.payload, spec)
    values = flatten(tensor).to(device)
    ours = kernels("encode_groups", values, spec.group_size, codec.grid)
    assert isinstance(ours, tuple)
    assert _same(ours[0], codes)
    assert _same(ours[1], scales)
    back = kernels(
        "decode_groups", *ours, spec.group_size, codec.grid, tensor.numel(), tensor.dtype
    )
    assert isinstance(back, torch.Tensor)
    assert _same(back, decoded.view(-1))


def _awkward(dtype: torch.dtype) -> torch.Tensor:
    """Rows of 200: ties, denormals, zeros of both signs, outliers, NaN and infinities."""
    rows = torch.randn(9, 200, generator=torch.Generator().manual_seed(0))
    rows[1] = torch.arange(200) - 100.5
    rows[2] = 0.0
    rows[3] *= torch.finfo(dtype).smallest_normal
    rows[4, ::7] *= 1e4
    rows[5, 3], rows[5, 5], rows[5, 7], rows[5, 9] = math.nan, math.inf, -math.inf, -0.0
    rows[6] = math.nan
    rows[7] = torch.finfo(dtype).max
    rows[8, :100] = -math.inf
    return rows.to(dtype)


@pytest.mark.thorough
@needs_triton
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", GROUPED)
def test_awkward_values(name: str, dtype: torch.dtype, interpreted: Kernels) -> None:
    _assert_same_as_torch(name, _awkward(dtype), interpreted, "cpu")


@pytest.mark.thorough
@needs_triton
@pytest.mark.parametrize("name", GROUPED)
@examples
@given(tensor=tensors(FLOATS))
def test_any_tensor(name: str, interpreted: Kernels, tensor: torch.Tensor) -> None:
    _assert_same_as_torch(name, tensor, interpreted, "cpu")


@pytest.mark.thorough
@needs_triton
@pytest.mark.parametrize("shape", [(2, MAX_KERNEL_GROUP), (MAX_KERNEL_GROUP + 77,), (5000, 3)])
def test_tiles_of_every_form(shape: tuple[int, ...], interpreted: Kernels) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    for name in ("int8", "int4"):
        _assert_same_as_torch(name, tensor, interpreted, "cpu")


def _assert_same_bits_packed(num_values: int, kernels: Kernels, device: str) -> None:
    flags = torch.randint(0, 3, (num_values,), dtype=torch.uint8)
    packed = kernels("pack_bits", flags.to(device))
    assert isinstance(packed, torch.Tensor)
    assert _same(packed, _pack_bits(flags))
    unpacked = kernels("unpack_bits", packed, num_values)
    assert isinstance(unpacked, torch.Tensor)
    assert _same(unpacked, _unpack_bits(packed.cpu(), num_values))
    assert _same(unpacked, (flags != 0).to(torch.uint8))


@pytest.mark.thorough
@needs_triton
@pytest.mark.parametrize("num_values", [0, 1, 8, 9, 4096, 5003])
def test_bits(num_values: int, interpreted: Kernels) -> None:
    _assert_same_bits_packed(num_values, interpreted, "cpu")


_BUILD = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_pyao.engine.codecs import get_codec, kernels

def ptx(kernel, arguments, constants):
    signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
    hints = {(i,): [["tt.divisibility", 16]] for i in range(len(arguments))}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options).asm["ptx"]

pointers = {"values_ptr": "*bf16", "codes_ptr": "*u8", "scales_ptr": "*fp32"}
decode_order = ("codes_ptr", "scales_ptr", "values_ptr")
counts = ("num_values", "num_groups", "group_size", "num_codes", "codes_per_group")
sizes = dict.fromkeys(counts, "i32")
for name in ("int8", "int4", "fp8"):
    grid = get_codec(name).grid
    shared = {"TOP": grid.top, "NAN": grid.nan, "BITS": grid.bits, "IS_FLOAT": grid.is_float,
              "ROWS": 32, "COLUMNS": 128}
    bounds = {"AMAX_FLOOR": 2.0**-93, "TOP_BESIDE_NONFINITE": grid.top_beside_nonfinite}
    print(ptx(kernels._encode_kernel, {**pointers, **sizes}, {**bounds, **shared}))
    print(ptx(kernels._decode_kernel, {**{k: pointers[k] for k in decode_order}, **sizes}, shared))
"""


@pytest.mark.thorough
@needs_triton
def test_gpu_code_rounds_as_ieee_says(tmp_path: Path) -> None:
    """Triton compiles for a GPU without having one: nothing approximate or fused comes out, and
    tensors move 16 bytes at a time. Some versions flush denormals; that changes no code."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _BUILD]
    built = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert built.returncode == 0, built.stderr
    num_divisions_per_thread = 32 * 128 // (4 * 32)
    divisions = re.findall(r"div\.rn(?:\.ftz)?\.f32", built.stdout)
    assert len(divisions) == 3 * num_divisions_per_thread
    assert not re.search(r"div\.full|approx|fma|rcp", built.stdout)
    widths = set(re.findall(r"(?:ld|st)\.global(\S*)", built.stdout))
    assert widths == {".v4.b32", ".b32"}  # the latter for scales


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", GROUPED)
def test_gpu_gives_the_same_bits(name: str, dtype: torch.dtype, triton_device: str) -> None:
    device = triton_device
    wide = torch.randn(300, 2048, generator=torch.Generator().manual_seed(0)).to(dtype)
    for tensor in (_awkward(dtype), _awkward(dtype).mT, wide):
        _assert_same_as_torch(name, tensor, _call, device)
        codec = study_codec(name)
        expected = codec.encode(tensor)
        on_device = codec.encode(tensor.to(device))
        for one, other in zip(on_device.payload, expected.payload, strict=True):
            assert _same(one, other)
        decoded = codec.decode(on_device.payload, on_device.spec)
        assert _same(decoded, codec.decode(expected.payload, expected.spec))


@pytest.mark.gpu
@pytest.mark.parametrize("name", GROUPED)
def test_gpu_plain_torch_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator without Triton takes the torch path."""
    monkeypatch.setattr("hf_pyao.engine.codecs.grouped.kernels_for", lambda tensor: None)
    device = torch.accelerator.current_accelerator()
    codec = study_codec(name)
    for dtype in FLOATS:
        expected = codec.encode(_awkward(dtype))
        on_device = codec.encode(_awkward(dtype).to(device))
        for one, other in zip(on_device.payload, expected.payload, strict=True):
            assert _same(one, other)
        decoded = codec.decode(on_device.payload, on_device.spec)
        assert _same(decoded, codec.decode(expected.payload, expected.spec))


@pytest.mark.gpu
@pytest.mark.parametrize("num_values", [0, 1, 9, 5003])
def test_gpu_packs_the_same_bits(num_values: int, triton_device: str) -> None:
    _assert_same_bits_packed(num_values, _call, triton_device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*GROUPED, "bitmask"])
def test_gpu_never_waits_for_the_host(name: str) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    dtype = torch.bool if name == "bitmask" else torch.bfloat16
    tensor = torch.ones(64, 512, device=device).to(dtype)
    codec = study_codec(name)
    encoded = codec.encode(tensor)  # builds the kernels
    codec.decode(encoded.payload, encoded.spec)
    with no_host_waits(device):
        with pytest.raises(RuntimeError, match="synchronizing"):
            tensor.sum().item()  # whatever waits is an error now
        encoded = codec.encode(tensor)
        decoded = codec.decode(encoded.payload, encoded.spec)
    assert decoded.shape == tensor.shape
    assert decoded.dtype == tensor.dtype


@pytest.mark.parametrize("name", [*GROUPED, "bitmask"])
def test_kernels_are_not_looked_for_on_a_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_working_kernels", lambda device_type: pytest.fail(device_type))
    codec = study_codec(name)
    tensor = torch.ones(8, 64, dtype=torch.bool if name == "bitmask" else torch.float32)
    encoded = codec.encode(tensor)
    assert torch.equal(codec.decode(encoded.payload, encoded.spec), tensor)


@pytest.mark.thorough
def test_without_working_triton_plain_torch_is_used_and_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"no module {name}")

    monkeypatch.setattr(importlib, "import_module", fail)
    backend._working_kernels.cache_clear()
    try:
        for _ in range(2):
            assert backend._working_kernels("cuda") is None
    finally:
        backend._working_kernels.cache_clear()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no module hf_pyao.engine.codecs.kernels" in caplog.text
