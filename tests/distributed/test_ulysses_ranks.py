"""DeepSpeed's Ulysses on two ranks: the bits of the same ranks without hf_pyao."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.ranks import needs_deepspeed, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough, needs_deepspeed]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.sampled(every=1000)
def test_a_sequence_that_trainer_divides_keeps_its_bits(stage: int, tmp_path: Path) -> None:
    """By Accelerate's ``sp_size``; policy ``auto`` has less memory than keeping everything takes."""
    ranks = run_ranks("tests.distributed.ulysses_trainer_worker", tmp_path, str(stage))
    for rank in ranks:
        assert len(rank["plain"]["bits"]) > 20
        same = (("offloaded", "plain"), ("long context", "levers"), ("auto", "levers"))
        for ours, reference in same:
            assert rank[ours]["losses"] == rank[reference]["losses"]
            assert rank[ours]["bits"] == rank[reference]["bits"]
        assert rank["offloaded"]["moved"] > rank["long context"]["moved"] > 0
        assert rank["auto"]["plan"] == ranks[0]["auto"]["plan"] is not None
        if stage == 2:  # the peak of ZeRO-3's step is not in its layers
            assert "predicted peak" in rank["auto"]["said"]
