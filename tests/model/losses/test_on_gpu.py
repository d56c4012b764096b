"""The chunked loss on an accelerator: the paths of its kernels, its error, its bytes, its waits."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hf_pyao.model.gradient_buffer import GradientBuffer, has_wide_products, wide_product
from hf_pyao.model.losses.chunking import plan_chunks
from hf_pyao.model.losses.cross_entropy import chunked_linear_cross_entropy
from hf_pyao.model.losses.transforms import Cast
from tests.gpu.device import no_host_waits
from tests.model.losses.reference import (
    Case,
    make_case,
    relative_error,
    run_chunked,
    run_own,
    run_truth,
)

pytestmark = pytest.mark.gpu

HALF = [torch.bfloat16, torch.float16]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(was_on)


@pytest.fixture
def device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return accelerator


def on(case: Case, device: torch.device) -> Case:
    """Return the case with its tensors on *device*."""
    names = ("hidden", "weight", "labels", "bias")
    moved = {name: getattr(case, name) for name in names if getattr(case, name) is not None}
    return replace(case, **{name: tensor.to(device) for name, tensor in moved.items()})


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_products_of_halves_are_summed_in_float32(dtype: torch.dtype, device: torch.device) -> None:
    left = torch.randn(64, 96, device=device).to(dtype)
    right = torch.randn(64, 32, device=device).to(dtype)
    exact = left.double().t() @ right.double()
    buffer = GradientBuffer(96, 32, dtype, device)
    for _ in range(3):
        buffer.add_product(left, right)
    result = buffer.finish(torch.tensor(1.0, device=device), keep=False)
    assert torch.equal(result, (3 * exact).to(dtype)) or (
        relative_error(result, 3 * exact) <= torch.finfo(dtype).eps
    )
    if has_wide_products(left):
        product = wide_product(left, torch.randn(96, 16, device=device).to(dtype))
        assert product.dtype == torch.float32


@pytest.mark.parametrize("options", [{}, {"with_bias": True, "cap": 5.0}], ids=["plain", "cap"])
def test_float64_matches_full_logits(options: dict[str, Any], device: torch.device) -> None:
    case = on(make_case(96, 203, 24, upcast=False, **options), device)
    got, expected = run_chunked(case, torch.float64), run_own(case, torch.float64)
    pairs = zip((got.loss, *got.grads), (expected.loss, *expected.grads), strict=True)
    assert all(relative_error(mine, theirs) <= 1e-12 for mine, theirs in pairs)


@pytest.mark.parametrize("factor", [1.0, 1 / 3])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_median_error_is_at_most_the_own_paths(
    dtype: torch.dtype, factor: float, device: torch.device
) -> None:
    errors: dict[Any, list[list[float]]] = {run_chunked: [], run_own: []}
    for seed in range(15):
        case = on(make_case(192, 1003, 64, seed=seed), device)
        truth = run_truth(case, dtype, factor=factor)
        for run, found in errors.items():
            result = run(case, dtype, factor=factor)
            pairs = zip((result.loss, *result.grads), (truth.loss, *truth.grads), strict=True)
            found.append([relative_error(value, exact) for value, exact in pairs])
    ours, own = (zip(*found, strict=True) for found in errors.values())
    for mine, theirs in zip(ours, own, strict=True):
        assert statistics.median(mine) <= 1.1 * statistics.median(theirs)


def test_nothing_waits_for_the_device(device: torch.device) -> None:
    case = on(make_case(192, 1003, 64), device)
    run_chunked(case, torch.bfloat16, chunk_tokens=64)
    torch.accelerator.synchronize()
    with no_host_waits(device):
        with pytest.raises(RuntimeError, match="synchronizing"):
            case.hidden.sum().item()  # whatever waits is an error now
        result = run_chunked(case, torch.bfloat16, chunk_tokens=64)
    assert result.loss.isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_stays_below_the_stated_bound(dtype: torch.dtype, device: torch.device) -> None:
    num_tokens, num_vocab, num_hidden, chunk = 4096, 20_000, 512, 512
    hidden = torch.randn(num_tokens, num_hidden, device=device, dtype=dtype, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(num_vocab, num_hidden, device=device, dtype=dtype))
    labels = torch.randint(0, num_vocab, (num_tokens,), device=device)
    steps = (Cast(torch.float32),)

    def peak_bytes(run: Any) -> int:
        run().backward()  # the workspace of cuBLAS stays
        hidden.grad = weight.grad = None
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        run().backward()
        peak = torch.accelerator.max_memory_allocated(device) - before
        hidden.grad = weight.grad = None
        return peak

    plan = plan_chunks(num_tokens, num_vocab, num_hidden, dtype, steps, chunk)
    bound = plan.chunk_bytes + 4 * num_hidden * (num_vocab + num_tokens)
    narrowing = 2 * 2**24 if dtype == torch.bfloat16 else 0  # a block of sums, and it scaled
    measured = peak_bytes(
        lambda: chunked_linear_cross_entropy(
            hidden, weight, labels, transforms=steps, chunk_tokens=chunk
        )
    )
    own = peak_bytes(lambda: F.cross_entropy(F.linear(hidden, weight).float(), labels))
    assert measured <= bound + narrowing + 2**21
    assert measured < own / 2
