"""BenchReport: figures, the comparison with the reference, and the round trip."""

from __future__ import annotations

import pytest

from hf_pyao.plan.documents.bench import BenchReport, StepTimes
from hf_pyao.plan.documents.schema import ReportError, to_plain
from tests.helpers.documents import make_bench, make_row


def test_step_times_are_median_and_quartiles() -> None:
    times = StepTimes.of([5.0, 1.0, 4.0, 2.0, 3.0], num_warmup=2)
    assert (times.lower_quartile_ms, times.median_ms, times.upper_quartile_ms) == (2.0, 3.0, 4.0)
    assert (times.num_steps, times.num_warmup) == (5, 2)
    assert times.all_ms == [5.0, 1.0, 4.0, 2.0, 3.0]


def test_rows_are_compared_with_the_reference() -> None:
    report = make_bench()
    equal = {row.method: row.are_gradients_equal for row in report.rows}
    assert equal == {
        "none": True,
        "pyao-window": True,
        "checkpoint": True,
        "trl-streams": False,
        "save-on-cpu": None,
        "deepspeed": None,
    }
    assert [row.is_loss_equal for row in report.rows[:4]] == [True] * 4


def test_the_reference_may_come_last() -> None:
    rows = [make_row("checkpoint", 100.0, 5.0, loss=1.0), make_row("none", 90.0, 8.0, loss=2.0)]
    assert make_bench(rows).rows[0].is_loss_equal is False


def test_a_bad_row_is_refused_by_its_number() -> None:
    plain = to_plain(make_bench())
    plain["rows"][1]["step"]["mean_ms"] = 3.0
    with pytest.raises(ReportError, match=r"rows\[1\], step has the key 'mean_ms'"):
        BenchReport.from_dict(plain)
