"""The judge of plans with collectives runs, and no point of its result file is worse."""

from __future__ import annotations

import itertools
import json

import pytest

from studies import judge_sharded_plans, judged_steps, sharded_steps
from tests.recipes.conftest import REPOSITORY

RESULT = REPOSITORY / "recipes" / "results" / "judged_sharded_plans.json"


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")  # OPT's layers
def test_smoke(capsys: pytest.CaptureFixture[str]) -> None:
    judge_sharded_plans.main(["--smoke"])
    found = capsys.readouterr().out
    assert "4 points" in found
    assert "+0.00 % at worst" in found


def test_no_point_of_the_result_file_is_worse() -> None:
    points = json.loads(RESULT.read_text())["points"]
    cases = {(p["engine"], p["model"]) for p in points}
    assert cases == set(itertools.product(sharded_steps.ENGINES, judged_steps.SIZES))
    assert len(points) == 16 * len(cases)
    assert max(p["chosen_ms"] / p["best_ms"] - 1 for p in points) <= 0.005
    assert all(p["predicted_ms"] == pytest.approx(p["chosen_ms"]) for p in points)
    waits = [p["waits_for_collectives_ms"] / p["chosen_ms"] for p in points]
    assert min(waits) < 0.05
    assert max(waits) > 0.3, "some have to wait for collectives much of the time"
