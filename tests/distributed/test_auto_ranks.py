"""Policy auto on two ranks: one plan for both, and the same gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_ranks_agree_on_one_plan_and_gradients_stay_right(wrapper: str, tmp_path: Path) -> None:
    found = run_ranks("tests.distributed.auto_worker", tmp_path, wrapper)
    for rank in found:
        assert rank["plain"]["bits"] == rank["planned"]["bits"]
    plans = [rank["planned"]["plan"] for rank in found]
    assert plans[0] == plans[1]
    assert plans[0]
    if wrapper == "ddp":
        levers = [rank["planned"]["levers"] for rank in found]
        assert levers[0] == levers[1]
        lengths = [rank["planned"]["runs_again"] for rank in found]
        assert lengths == [levers[0]["checkpoint_every"]] * 2 == [1, 1]
