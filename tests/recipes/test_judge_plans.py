"""The planner's judge runs, and its result file says what its page says."""

from __future__ import annotations

import json

import pytest

from studies import judge_plans
from studies.judge_plans import grid_point
from tests.recipes.conftest import REPOSITORY

RESULT = REPOSITORY / "recipes" / "results" / "judged_plans.json"


@pytest.mark.thorough
def test_a_point_is_judged_by_the_engine_too() -> None:
    point = grid_point("opt", 64, 1, "rtx4070", 12.5, 1, share=0.4, is_by_engine=True)
    assert point.chosen_ms == pytest.approx(point.predicted_ms, rel=1e-6)
    assert point.by_engine_ms == pytest.approx(point.chosen_ms, rel=1e-4)
    assert point.peak_bytes <= point.limit_bytes
    assert point.gap <= 0.01


@pytest.mark.thorough
def test_smoke(capsys: pytest.CaptureFixture[str]) -> None:
    judge_plans.main(["--smoke"])
    assert "2 points" in capsys.readouterr().out


def test_no_point_of_the_result_file_is_worse() -> None:
    result = json.loads(RESULT.read_text())
    points = result["grid"]
    assert len(points) >= 36
    assert max(p["chosen_ms"] / p["best_ms"] - 1 for p in points) <= 0.01
    judged = [p for p in points if p["by_engine_ms"] is not None]
    assert len(judged) >= 12
    assert max(abs(p["chosen_ms"] / p["by_engine_ms"] - 1) for p in judged) <= 0.005
