"""Recomputing under DDP and FSDP2, on two ranks: same bits as without hf_pyao."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.thorough
def test_two_ranks_compute_the_same_bits(tmp_path: Path) -> None:
    found = run_ranks("tests.engine.recompute.recompute_worker", tmp_path)
    for rank, results in enumerate(found):
        # collectives; wrappers, models alone and beside offloading, sets
        assert len(results) == 3 + 3 * (3 * 2 + 7)
        for name, facts in results.items():
            assert facts["different"] == [], f"rank {rank}, {name}"
            assert facts["num_tensors"] > 20
            assert facts["recomputed_bytes"] > 0, f"rank {rank}, {name}"
