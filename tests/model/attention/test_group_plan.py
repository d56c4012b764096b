"""How calls of attention are divided."""

from __future__ import annotations

import random

import pytest
import torch

from hf_pyao.model.attention.kernels import AttentionCall, FlashKernel
from hf_pyao.plan.hardware.kernel_settings import KernelSettings
from hf_pyao.plan.options.group_plan import MIB, TARGET_BYTES, plan_groups


@pytest.mark.parametrize("seed", range(200))
def test_groups_are_all_pairs_once_in_order(seed: int) -> None:
    rng = random.Random(seed)
    num_samples, num_heads = rng.randrange(1, 20), rng.randrange(1, 20)
    least = rng.choice([1, 1, rng.randrange(1, 60)])
    setting = rng.choice(["auto", rng.randrange(2, 50)])
    plan = plan_groups(
        setting,
        num_samples=num_samples,
        num_heads=num_heads,
        pair_bytes=rng.randrange(1, 100 * MIB),
        least_pairs=least,
        least_pairs_of_auto=rng.randrange(1, 10),
    )
    groups = list(plan.groups())
    assert len(groups) == plan.num_groups
    pairs = []
    for group in groups:
        part = [
            (sample, head)
            for sample in range(group.first_sample, group.end_sample)
            for head in range(group.first_head, group.end_head)
        ]
        assert part
        assert plan.num_groups == 1 or len(part) >= least
        pairs += part
    # In order, so that a group's pairs follow those of the group before.
    assert pairs == [(s, h) for s in range(num_samples) for h in range(num_heads)]
    sizes = [g.end_head - g.first_head for g in groups]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("samples", "heads", "pair_mib", "least", "expected"),
    [
        (1, 8, 700, 1, (1, 8)),  # long: each key-value head by itself
        (1, 8, 16, 1, (1, 2)),
        (1, 8, 700, 3, (1, 2)),  # fewer than three heads do not fill the device
        (1, 8, 700, 9, (1, 1)),
        (280, 32, 0.25, 1, (35, 1)),
        (280, 32, 0.25, 1000, (8, 1)),
        (4, 8, 1, 1, (1, 1)),
        (4, 8, 64, 1, (4, 8)),
    ],
)
def test_auto(
    samples: int, heads: int, pair_mib: float, least: int, expected: tuple[int, int]
) -> None:
    pair_bytes = int(pair_mib * MIB)
    plan = plan_groups(
        "auto",
        num_samples=samples,
        num_heads=heads,
        pair_bytes=pair_bytes,
        least_pairs=1,
        least_pairs_of_auto=least,
    )
    assert (plan.num_sample_groups, plan.num_head_groups) == expected
    if least == 1 and pair_bytes <= TARGET_BYTES:
        largest = max(
            (g.end_sample - g.first_sample) * (g.end_head - g.first_head) for g in plan.groups()
        )
        assert largest * pair_bytes <= TARGET_BYTES


def num_splits(pairs: int, length: int, multiprocessors: int) -> int:
    """FlashAttention-2's heuristic, written down from its source, for many keys."""
    if pairs * -(-length // 64) >= 0.8 * 2 * multiprocessors:
        return 1
    return 2  # or more


@pytest.mark.parametrize("multiprocessors", [46, 80, 108, 128, 132, 148])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 500, 4096, 100_000])
def test_least_pairs_are_those_of_a_single_split(multiprocessors: int, length: int) -> None:
    query = torch.empty(1, 1, length, 8, device="meta")
    call = AttentionCall(query, query, query)
    kernel = FlashKernel(KernelSettings(multiprocessors))
    least = kernel.least_pairs(call, is_auto=False)
    assert num_splits(least, length, multiprocessors) == 1
    assert least == 1 or num_splits(least - 1, length, multiprocessors) == 2
    call = call._replace(dropout_p=0.1)  # dropout never splits
    assert kernel.least_pairs(call, is_auto=False) == 1
    kernel = FlashKernel(KernelSettings(multiprocessors, is_deterministic=True))
    deterministic = kernel.least_pairs(call, is_auto=False)
    assert -(-multiprocessors // deterministic) == 1
    assert -(-multiprocessors // (deterministic - 1)) == 2
