"""Two ranks whose Trainers choose a micro-batch: both take the smaller choice, or both stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_out_of_memory_ranks import run

pytestmark = pytest.mark.distributed

WORKER = "tests.distributed.micro_batch_worker"


@pytest.mark.thorough
def test_all_ranks_take_the_smallest_choice(tmp_path: Path) -> None:
    found = run(tmp_path, "1", module=WORKER)
    assert [facts["sizes"] for facts in found] == [[1, 8], [1, 8]]
    assert [facts["world_size"] for facts in found] == [2, 2]
    assert [facts["num_steps"] for facts in found] == [3, 3]
    assert found[0]["digest"] == found[1]["digest"]
    assert "trains with micro-batch 1 accumulated 8 times instead of" in found[0]["log"]
    assert "Memory ran out as 8, 4, 2 was tried." in found[0]["log"]


@pytest.mark.thorough
def test_all_ranks_stop_where_one_has_nothing_that_fits(tmp_path: Path) -> None:
    first, second = run(tmp_path, "0", module=WORKER)
    assert "micro-batches 8, 4, 2, 1 were tried, and memory ran out" in second["error"]
    assert first["error"].startswith("rank 1 could not choose a micro-batch: ")
