"""Fingerprints of tensors, judged by the same sum written out with Python's integers."""

from __future__ import annotations

import pytest
import torch

from hf_pyao.engine.recompute.fingerprints import ROW_LENGTH, Fingerprinter

MASK = (1 << 64) - 1


def mixed(number: int) -> int:
    """splitmix64's finaliser, as published, made odd."""
    z = (number * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) | 1


def written_out(content: bytes) -> int:
    width = next(width for width in (4, 2, 1) if len(content) % width == 0)
    total = 0
    for index in range(len(content) // width):
        word = content[index * width : (index + 1) * width]
        row, column = divmod(index, ROW_LENGTH)
        weight = mixed(1 + column) + mixed(1 + ROW_LENGTH + row) - 1
        total += int.from_bytes(word, "little", signed=width > 1) * weight
    total &= MASK
    return total - (1 << 64) if total >> 63 else total


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 5), torch.float32),
        ((7, 1001), torch.bfloat16),
        ((4, ROW_LENGTH), torch.float32),
        ((3,), torch.bool),
        ((129, 77), torch.int8),
        ((), torch.float64),
        ((0, 4), torch.float32),
        ((31, 33), torch.complex64),
    ],
)
def test_the_sum_is_the_one_that_is_documented(shape, dtype):
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 9).to(dtype)
    content = bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""

    assert Fingerprinter().of(tensor).item() == written_out(content)


def test_views_are_read_in_place_where_they_are_dense_and_copied_where_not():
    of = Fingerprinter().of
    base = torch.randn(6, 8, 10)

    assert of(base.permute(2, 0, 1)) == of(base)  # the same memory
    assert of(base[2:4]) == of(base[2:4].clone())
    assert of(base[:, 1:3]) == of(base[:, 1:3].contiguous())
    assert of(base[0, 0].expand(4, 10)) == of(base[0, 0].expand(4, 10).contiguous())


def test_a_fingerprint_has_no_graph_and_draws_nothing():
    state = torch.get_rng_state()
    found = Fingerprinter().of(torch.randn(5, generator=torch.Generator()).requires_grad_())

    assert not found.requires_grad
    assert found.dtype is torch.int64 and found.dim() == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [0, 5, ROW_LENGTH, 3 * ROW_LENGTH + 7])
def test_projections_differ_by_rounding_or_by_the_norm(count, dtype):
    torch.manual_seed(0)
    tensor = torch.randn(count).to(dtype)
    projection = Fingerprinter().projection

    found, norm = projection(tensor).tolist()
    assert norm == pytest.approx(tensor.double().norm().item(), rel=1e-2)
    assert abs(found) <= norm * max(1, count) ** 0.5 + 1e-6
    if count > 5:
        near, _ = projection(tensor * (1 + torch.finfo(dtype).eps)).tolist()
        far, _ = projection(torch.randn(count).to(dtype)).tolist()
        assert abs(near - found) <= 8 * torch.finfo(dtype).eps * norm
        assert abs(far - found) > 64 * torch.finfo(torch.float32).eps * norm
