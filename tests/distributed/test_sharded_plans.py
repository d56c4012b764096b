"""Policy auto on two and four ranks that FSDP2 shards a model over: plans, bits, bytes.

Each rank asserts that its layers are units of FSDP2; see ``sharded_worker.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.models import BATCH, SEQUENCE
from tests.distributed.sharded_worker import CASES, LARGER_ON
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.distributed

WORKER = "tests.distributed.sharded_worker"

MOST_OVER = 1.1
"""By what factor the peak of a plan that was measured may be above the counted one."""


def check(case: str, ranks: list[dict[str, Any]]) -> None:
    """Check what the *ranks* saw of a case."""
    for rank in ranks:
        assert "error" not in rank, rank["error"]
        assert rank["different"] == []
        assert rank["num"] > 20, "a loss, and a gradient of each parameter"
        planned, plain = rank["planned"], rank["plain"]
        assert planned["parameters_moved"] == planned["misses"] == planned["false_positives"] == []
        assert planned["plan"], planned["summary"]
        if case not in ("chunked loss", *LARGER_ON):
            assert plain["tracked"] == plain["counted"] > planned["counted"]
    first, *others = (rank["planned"] for rank in ranks)
    if case not in LARGER_ON:
        counted = max(each["counted"] for each in (first, *others))
        measured = first["predicted"] + first["unpredicted"]
        assert counted <= measured
        assert measured <= MOST_OVER * counted
    changed = [
        next(at for at, mode in each["changes"] if mode in FOLLOWS) for each in (first, *others)
    ]
    assert len(set(changed)) == 1
    if LARGER_ON.get(case) == 1:
        larger = 2 * BATCH * SEQUENCE
        assert first["elements"] == others[0]["elements"] == larger, "planned for the other's batch"
    if case == "batches differ":  # the first process takes a plan for larger ones at once
        return
    for second in others:
        for what in ("plan", "levers", "window"):
            assert first[what] == second[what]
        if case not in LARGER_ON:
            assert first["offloaded_bytes"] == second["offloaded_bytes"]


FOLLOWS = ("CHECKING", "FOLLOWING")


def test_ranks_follow_one_plan_and_gradients_keep_their_bits(tmp_path: Path) -> None:
    case = "mixed precision"
    check(case, [rank[case] for rank in run_ranks(WORKER, tmp_path, case)])


@pytest.mark.thorough
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_each_way_to_train_keeps_its_bits(num_ranks: int, tmp_path: Path) -> None:
    cases = CASES if num_ranks == 2 else ("plain", "mixed precision", "segments")
    found = run_ranks(WORKER, tmp_path, *cases, num_ranks=num_ranks, timeout_s=900)
    for case in cases:
        check(case, [rank[case] for rank in found])
