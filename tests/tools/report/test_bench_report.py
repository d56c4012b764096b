"""BenchReport: figures, the comparison with the reference, and the round trip."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_pyao.plan.documents.bench import BenchReport, FactsReport, StepTimes
from hf_pyao.plan.documents.schema import ReportError, to_plain, write_json
from hf_pyao.tools.report.kinds import read_document
from tests.helpers.documents import make_bench, make_facts, make_row


def test_step_times_are_median_and_quartiles() -> None:
    times = StepTimes.of([5.0, 1.0, 4.0, 2.0, 3.0], num_warmup=2)
    assert (times.lower_quartile_ms, times.median_ms, times.upper_quartile_ms) == (2.0, 3.0, 4.0)
    assert (times.num_steps, times.num_warmup) == (5, 2)
    assert times.all_ms == [5.0, 1.0, 4.0, 2.0, 3.0]


def test_one_step_has_its_time_for_quartiles() -> None:
    times = StepTimes.of([7.0], num_warmup=0)
    assert (times.lower_quartile_ms, times.median_ms, times.upper_quartile_ms) == (7.0, 7.0, 7.0)


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


def test_without_a_reference_nothing_is_compared() -> None:
    report = make_bench([make_row("checkpoint", 100.0, 5.0)])
    assert report.rows[0].are_gradients_equal is None


def test_the_reference_may_come_last() -> None:
    rows = [make_row("checkpoint", 100.0, 5.0, loss=1.0), make_row("none", 90.0, 8.0, loss=2.0)]
    assert make_bench(rows).rows[0].is_loss_equal is False


def test_it_is_read_back_whole(tmp_path: Path) -> None:
    report = make_bench()
    write_json(tmp_path / "bench.json", report)
    assert read_document(tmp_path / "bench.json") == report
    write_json(tmp_path / "facts.json", make_facts())
    assert read_document(tmp_path / "facts.json") == make_facts()


def test_a_bad_row_is_refused_by_its_number() -> None:
    plain = to_plain(make_bench())
    plain["rows"][1]["step"]["mean_ms"] = 3.0
    with pytest.raises(ReportError, match=r"rows\[1\], step has the key 'mean_ms'"):
        BenchReport.from_dict(plain)


@pytest.mark.parametrize("reader", [BenchReport, FactsReport])
def test_another_version_is_refused(reader: type[BenchReport] | type[FactsReport]) -> None:
    with pytest.raises(ReportError, match=f"schema_version 2.*version 1 of a {reader.__name__}"):
        reader.from_dict({"schema_version": 2})


def test_a_search_is_told_by_its_tries() -> None:
    assert not make_bench().is_search
    assert make_bench([make_row("none", 10.0, 1.0, num_tried=5)]).is_search
