"""Policy auto on two ranks: one plan for both, and the same gradients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.conftest import REPOSITORY

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_ranks_agree_on_one_plan_and_gradients_stay_right(wrapper: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.auto_worker", wrapper, str(rank), tmp_path],
            cwd=REPOSITORY,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=300)
        assert worker.returncode == 0, errors
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
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
