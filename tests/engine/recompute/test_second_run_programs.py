"""Layers and micro-batches that run again: the same bits as without hf_pyao, or a refusal by name."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.helpers.second_run_programs import of_seed

NUM_LONG = 3000


def check(seeds: range) -> Counter[str]:
    """Run the programs of *seeds*; every tenth one trains in two threads."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        found = of_seed(seed)
        assert isinstance(found, str) or not found, f"seed {seed}: {found[:4]} differ"
        counts[found if isinstance(found, str) else "same"] += 1
    return counts


@pytest.fixture(autouse=True)
def _is_quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.CRITICAL)
    gc.freeze()  # micro-batches that run again collect garbage; what was imported stays
    yield
    gc.unfreeze()


def test_random_programs() -> None:
    counts = check(range(16, 22))
    assert counts["same"] >= 3


@pytest.mark.thorough
@pytest.mark.parametrize("start", range(0, NUM_LONG, 300))
def test_many_random_programs(start: int) -> None:
    counts = check(range(start, start + 300))
    # Most are refused a second try after memory ran out: they hold generators, or change containers.
    assert counts["same"] >= 45
    assert counts["refused"] <= 25
