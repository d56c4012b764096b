"""In float32 and half precision we are no farther from the float64 truth than the own path is."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

from tests.model.losses.reference import make_case, relative_error, run_chunked, run_own, run_truth

SEEDS = range(15)

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"with_bias": True},
    "cap": {"cap": 8.0},
    "scale": {"scale": 0.3},
}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("factor", [1.0, 1 / 3], ids=["plain", "accumulated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head", HEADS)
def test_median_error_is_at_most_the_own_paths(
    head: str, dtype: torch.dtype, factor: float
) -> None:
    ours: list[list[float]] = []
    own: list[list[float]] = []
    for seed in SEEDS:
        case = make_case(96, 203, 24, seed=seed, **HEADS[head])
        truth = run_truth(case, dtype, factor=factor)
        for run, errors in ((run_chunked, ours), (run_own, own)):
            result = run(case, dtype, factor=factor)
            pairs = zip((result.loss, *result.grads), (truth.loss, *truth.grads), strict=True)
            errors.append([relative_error(value, expected) for value, expected in pairs])
    names = ["loss", "hidden", "weight", "bias"]
    for name, mine, theirs in zip(
        names, zip(*ours, strict=True), zip(*own, strict=True), strict=False
    ):
        assert statistics.median(mine) <= 1.1 * statistics.median(theirs), name
