"""DeepSpeed's Ulysses on two ranks: the bits of the same ranks without hf_pyao."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.ranks import needs_deepspeed, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough, needs_deepspeed]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.sampled(every=1000)
def test_a_divided_sequence_keeps_its_bits(stage: int, tmp_path: Path) -> None:
    for rank in run_ranks("tests.distributed.ulysses_worker", tmp_path, str(stage)):
        assert len(rank["plain"]["bits"]) > 20
        for ours, reference in (("offloaded", "plain"), ("long context", "levers")):
            assert rank[ours]["losses"] == rank[reference]["losses"]
            assert rank[ours]["bits"] == rank[reference]["bits"]
        assert rank["offloaded"]["moved"] > rank["long context"]["moved"] > 0
        assert rank["levers"]["losses"] == pytest.approx(rank["plain"]["losses"], rel=1e-5)
