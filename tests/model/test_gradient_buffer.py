"""Sums in float32 inside the bytes of a half-precision result."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_pyao.model import gradient_buffer
from hf_pyao.model.gradient_buffer import GradientBuffer
from tests.helpers.ledger import AllocationLedger

CPU = torch.device("cpu")
HALF = [torch.bfloat16, torch.float16]


def products(num_rows: int, num_cols: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """Three chunks of factors."""
    generator = torch.Generator().manual_seed(num_rows * 100 + num_cols)
    return [
        tuple(
            torch.randn(n, width, generator=generator).to(dtype) for width in (num_rows, num_cols)
        )
        for n in (4, 9, 1)
    ]


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 33),
    num_cols=st.integers(1, 9),
    padding=st.integers(0, 5),
    dtype=st.sampled_from([torch.float64, torch.float32, *HALF]),
    keep=st.booleans(),
    block=st.sampled_from([1, 7, 2**22]),
)
def test_sums_of_products(
    num_rows: int, num_cols: int, padding: int, dtype: torch.dtype, keep: bool, block: int
) -> None:
    chunks = products(num_rows, num_cols, dtype)
    buffer = GradientBuffer(num_rows + padding, num_cols, dtype, CPU, num_rows)
    wide = torch.zeros(num_rows, num_cols, dtype=buffer.wide_dtype)
    for left, right in chunks:
        buffer.add_product(left, right)
        wide += left.to(wide.dtype).t() @ right.to(wide.dtype)
    expected = torch.zeros(num_rows + padding, num_cols, dtype=dtype)
    expected[:num_rows] = (wide * 3).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_buffer, "_BLOCK_ELEMENTS", block)
        results = [buffer.finish(torch.tensor(3, dtype=wide.dtype), keep=keep)]
        if keep:
            results.append(buffer.finish(torch.tensor(3, dtype=wide.dtype), keep=False))
    for result in results:
        torch.testing.assert_close(result, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
        assert result.untyped_storage().nbytes() == result.numel() * dtype.itemsize
    with pytest.raises(RuntimeError, match="handed over"):
        buffer.finish(torch.tensor(1.0), keep=False)


def test_halves_are_rounded_once() -> None:
    # 1 + 256 * 2**-9 in steps: bfloat16 sums would stay at 1, the float32 sum is 1.5.
    buffer = GradientBuffer(2, 1, torch.bfloat16, CPU)
    buffer.add(torch.ones(2, 1, dtype=torch.bfloat16))
    for _ in range(256):
        buffer.add(torch.full((2, 1), 2.0**-9, dtype=torch.bfloat16))
    result = buffer.finish(torch.tensor(1.0), keep=False)
    assert torch.equal(result, torch.full((2, 1), 1.5, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 24])
def test_rows_written_in_any_pieces(num_rows: int, dtype: torch.dtype) -> None:
    values = torch.randn(num_rows, 5)
    buffer = GradientBuffer(num_rows, 5, dtype, CPU)
    for start in range(0, num_rows, 5):
        buffer.write_rows(start, values[start : start + 5])
    result = buffer.finish(torch.tensor(1.0), keep=False)
    assert torch.equal(result, values.to(dtype))


def test_nothing_written_is_zero() -> None:
    result = GradientBuffer(4, 3, torch.bfloat16, CPU).finish(torch.tensor(1.0), keep=False)
    assert torch.equal(result, torch.zeros(4, 3, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_peak_is_one_float32_gradient(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_buffer, "_BLOCK_ELEMENTS", 1024)
    left, right = torch.randn(8, 512).to(dtype), torch.randn(8, 256).to(dtype)
    one = torch.tensor(1.0)
    with AllocationLedger() as ledger:
        buffer = GradientBuffer(512, 256, dtype, CPU)
        buffer.add_product(left, right)
        result = buffer.finish(one, keep=False)
        del buffer
    factors_bytes = (left.numel() + right.numel()) * 4  # widened for a CPU's product
    assert ledger.peak_bytes <= 512 * 256 * 4 + factors_bytes + 4 * 1024 * 4
    assert ledger.live_bytes == result.numel() * dtype.itemsize
