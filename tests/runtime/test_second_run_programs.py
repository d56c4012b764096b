"""Layers and micro-batches that run again: the same bits as without hf_pyao, or a refusal by name."""

from __future__ import annotations

import logging

import pytest

from tests.runtime.second_run_programs import Program

NUM_LONG = 3000


def check(seeds: range) -> dict[str, int]:
    counts = {"same": 0, "refused": 0, "invalid": 0}
    for seed in seeds:
        found = Program(seed).differences()
        if isinstance(found, str):
            counts[found] += 1
            continue
        assert not found, f"seed {seed}: {found[:4]} differ"
        counts["same"] += 1
    return counts


@pytest.fixture(autouse=True)
def _is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def test_random_programs() -> None:
    counts = check(range(8))
    assert counts["same"] >= 5


@pytest.mark.thorough
@pytest.mark.parametrize("start", range(0, NUM_LONG, 300))
def test_many_random_programs(start: int) -> None:
    check(range(start, start + 300))
