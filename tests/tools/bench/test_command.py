"""``pyao bench`` as users start it: its smoke run."""

from __future__ import annotations

import pytest

from hf_pyao.plan.documents.bench import OK, UNAVAILABLE, BenchReport
from hf_pyao.tools.bench.arguments import SMOKE_METHODS
from tests.recipes.conftest import run_once

pytestmark = pytest.mark.thorough  # the bench tests run the same in one process


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, BenchReport]:
    """What the smoke run printed, and the report that it wrote."""
    command = ("-m", "hf_pyao.cli", "bench", "--smoke", "--device", "cpu", "--output", "out.json")
    folder, printed = run_once(tmp_path_factory, "pyao_bench", *command, timeout=300)
    return printed, BenchReport.from_json_file(folder / "out.json")


def test_each_method_has_its_row(smoke: tuple[str, BenchReport]) -> None:
    _, report = smoke
    assert [row.method for row in report.rows] == list(SMOKE_METHODS)
    statuses = {row.method: row.status for row in report.rows}
    assert statuses.pop("trl-streams") == UNAVAILABLE
    assert set(statuses.values()) == {OK}


def test_rows_have_times_memory_and_equal_gradients(smoke: tuple[str, BenchReport]) -> None:
    _, report = smoke
    for row in report.rows:
        if row.status != OK:
            assert row.reason
            continue
        assert row.step is not None
        assert row.step.num_steps == 2
        assert row.step.lower_quartile_ms <= row.step.median_ms <= row.step.upper_quartile_ms
        assert row.peak_allocated_bytes is None, "a CPU counts no device memory"
        assert row.peak_rss_bytes is not None
        assert row.is_loss_equal
        assert row.are_gradients_equal
    ours = report.row_of("pyao-window")
    assert ours is not None
    assert ours.metrics["num_slots"] > 0
