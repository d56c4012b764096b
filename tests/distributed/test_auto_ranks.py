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


@pytest.mark.parametrize("wrapper", ["hsdp", "fewer ranks"])
@pytest.mark.sampled(every=1000)
def test_four_ranks(wrapper: str, tmp_path: Path) -> None:
    """Two copies of two shards each; four shards of which two are gathered for backward."""
    found = run_ranks("tests.distributed.auto_worker", tmp_path, wrapper, num_ranks=4)
    for rank in found:
        assert rank["plain"]["bits"] == rank["planned"]["bits"]
        assert rank["planned"]["plan"] == found[0]["planned"]["plan"]
    if wrapper == "hsdp":
        assert found[0]["planned"]["plan"]
    else:  # is not recorded
        assert "resharded to 2 ranks" in found[0]["planned"]["summary"]
