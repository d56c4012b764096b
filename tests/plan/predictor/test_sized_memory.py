"""What a size needs, as far as a search has to know it."""

from __future__ import annotations

import random
from typing import cast

import pytest

from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.predictor.largest import largest_on_a_line
from hf_pyao.plan.predictor.sized_memory import NeededAt, SizedMemory

SETTINGS = AllocatorSettings()


class MadeUpMemory:
    """Needs a share more than its peak, and counts how often that share is replayed."""

    def __init__(self, peak_bytes: int, share: float) -> None:
        self.peak_bytes = peak_bytes
        self.needed_bytes = int(share * peak_bytes)
        self.num_replayed = 0

    def fits(self, limit_bytes: float, settings: AllocatorSettings) -> bool:
        return self.needed_bytes <= limit_bytes

    def needed_about(self, limit_bytes: float, settings: AllocatorSettings) -> int:
        self.num_replayed += 1
        return self.needed_bytes


@pytest.mark.parametrize("seed", range(30))
def test_what_it_says_decides_as_replays_do_and_few_sizes_are_asked_for(seed: int) -> None:
    draw = random.Random(seed)
    base, each, limit = draw.randint(0, 10**9), draw.randint(10**6, 10**8), 12 * 10**9
    shares = {size: draw.choice([1.02, 1.1, 1.2]) + 0.02 * draw.random() for size in range(14_000)}
    usual = draw.choice(list(shares.values()))  # of most sizes
    memories: dict[int, MadeUpMemory] = {}

    def memory_at(size: int) -> SizedMemory:
        if size not in memories:
            share = shares[size] if draw.random() < 0.1 else usual
            memories[size] = MadeUpMemory(base + each * size, share)
        return cast(SizedMemory, memories[size])

    needed_at = NeededAt(memory_at, limit, SETTINGS)
    for size in draw.sample(range(1, 14_000), 40):
        assert (needed_at(size) <= limit) == memory_at(size).fits(limit, SETTINGS)
    memories.clear()
    found = largest_on_a_line(needed_at, limit, slack=1 / 256)
    assert memories[found].needed_bytes <= limit
    assert len(memories) <= 12
