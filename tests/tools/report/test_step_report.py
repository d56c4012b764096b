"""Steps as documents: shown, drawn, and as a Chrome trace."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hf_pyao.cli import main
from hf_pyao.plan.documents.profile import Profile, ProfiledSpan
from hf_pyao.plan.documents.schema import ReportError, write_json
from hf_pyao.plan.documents.step import StepSpan, StepTotals
from hf_pyao.tools.report.chrome_trace import trace_of
from hf_pyao.tools.report.kinds import figure_of
from hf_pyao.tools.report.plots.draw import FINEST
from tests.helpers.documents import PROVENANCE, make_bench, make_step


def test_as_many_spans_as_there_may_be_make_no_large_picture() -> None:
    spans = [
        StepSpan(lane="offload", label=f"slot {n % 7}", start_ms=n / 100, end_ms=(n + 0.5) / 100)
        for n in range(20_000)
    ]
    figure = figure_of(make_step(spans=spans, totals=StepTotals(step_ms=200.0)))
    assert figure is not None
    drawn = [len(bars.get_paths()) for bars in figure.axes[1].collections]
    assert 0 < sum(drawn) <= FINEST + 1


# ---- the trace -----------------------------------------------------------------------------------


def test_the_trace_is_what_viewers_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = make_step(title="a\nb")
    for name in ("one", "two"):
        write_json(tmp_path / f"{name}.json", step)
    files = [str(tmp_path / f"{name}.json") for name in ("one", "two")]
    assert main(["report", *files, "-o", str(tmp_path / "trace.json")]) == 0
    assert "written: " in capsys.readouterr().out
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["a b", "a b"]
    for process in (1, 2):
        mine = [event for event in events if event["pid"] == process]
        threads = {e["tid"]: e["args"]["name"] for e in mine if e["name"] == "thread_name"}
        spans = [event for event in mine if event["ph"] == "X"]
        assert [event["ts"] for event in spans] == sorted(event["ts"] for event in spans)
        assert all(event["dur"] >= 0 for event in spans)
        found = [(threads[e["tid"]], e["name"], e["ts"], e["ts"] + e["dur"]) for e in spans]
        assert sorted(found) == sorted(
            (s.lane, s.label, 1e3 * s.start_ms, 1e3 * s.end_ms) for s in step.spans
        )
        counters = [(e["ts"], e["args"]["bytes"]) for e in mine if e["ph"] == "C"]
        assert counters == [(1e3 * point.time_ms, point.nbytes) for point in step.memory]


def test_kinds_without_spans_have_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        ReportError, match=r"kind 'bench' does not hold; kinds that may: profile, step\."
    ):
        trace_of([make_step(), make_bench()])
    write_json(tmp_path / "x.json", make_bench())
    assert main(["report", str(tmp_path / "x.json"), "-o", str(tmp_path / "trace.json")]) == 2
    assert "ends in .md or .html for this" in capsys.readouterr().err
    assert not (tmp_path / "trace.json").exists()


def test_a_profile_with_a_timeline_is_a_trace_too() -> None:
    spans = [("offload", "b", 1.0, 4.0), ("forward", "a", -1.0, 3.0), ("decode", "c", 5.0, 4.9)]
    profile = Profile(
        title="t",
        model={},
        device="d",
        num_micro_batches=1,
        layer_names=["a"],
        modules=[],
        slots=[],
        link={},
        timeline=[
            ProfiledSpan(lane=lane, label=label, start_ms=start, end_ms=end)
            for lane, label, start, end in spans
        ],
        provenance=PROVENANCE,
    )
    events = [event for event in trace_of([profile])["traceEvents"] if event["ph"] == "X"]
    found = [(event["cat"], event["name"], event["ts"], event["dur"]) for event in events]
    assert found == [("forward", "a", 0, 4000), ("offload", "b", 2000, 3000)]
    with pytest.raises(ReportError, match="this document of kind 'profile' does not hold"):
        trace_of([dataclasses.replace(profile, timeline=[])])


def test_a_file_that_is_read_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.json"
    write_json(path, make_step())
    before = path.read_bytes()
    assert main(["report", str(path), "-o", str(tmp_path / "." / "step.json")]) == 2
    assert "one of the files that are read" in capsys.readouterr().err
    assert path.read_bytes() == before
