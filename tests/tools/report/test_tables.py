"""Tables: every figure with its unit, losing rows and rows without figures included."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from hf_pyao.plan.documents.bench import OUT_OF_MEMORY, BenchRow
from hf_pyao.tools.report.tables import markdown_of
from hf_pyao.tools.report.terminal import show_view, text_of_view
from hf_pyao.tools.report.views.bench_view import bench_table
from hf_pyao.tools.report.views.view import Table, View
from tests.helpers.documents import make_bench, make_row, make_run


def test_a_benchmark_as_a_table() -> None:
    header, rows, _ = bench_table(make_bench())
    assert header == [
        "method",
        "result",
        "step, ms",
        "against nothing",
        "quartiles, ms",
        "tokens/s",
        "peak allocated, GiB",
        "host memory +GiB",
        "loss and gradients",
    ]
    cells = {row[0]: row[1:] for row in rows}
    assert cells["none"] == [
        *("measured", "100", "1.00×", "99.5–102", "20,480", "8.00", "0.25", "reference"),
    ]
    assert cells["pyao-window"][-1] == "equal bits"
    assert cells["checkpoint"][1:3] == ["131", "1.31×"]
    assert cells["trl-streams"][-1] == "gradients differ"
    assert cells["save-on-cpu"] == ["out of memory", *["–"] * 7]
    assert cells["deepspeed"][0] == "cannot run here"


def test_a_cpu_s_figures_come_with_a_warning() -> None:
    report = make_bench()
    warning = "There was no device"
    assert warning not in markdown_of(report)
    on_cpu = dataclasses.replace(report, device={"name": "CPU", "memory_gib": None})
    assert warning in markdown_of(on_cpu)


def test_a_search_shows_micro_batches_and_compares_no_times() -> None:
    rows = [
        make_row("none", 100.0, 8.0, num_tried=5, micro_batch=7, gradient_digest=None),
        BenchRow(method="x", label="x", status=OUT_OF_MEMORY, micro_batch=0, num_tried=1),
    ]
    header, cells, _ = bench_table(make_bench(rows))
    assert "against nothing" not in header
    column = header.index("largest micro-batch")
    assert [row[column] for row in cells] == ["7", "0"]


def test_markdown_says_why_and_where_from() -> None:
    text = markdown_of(make_bench())
    assert text.startswith("## opt 1.3b, micro-batch 4 x 512 tokens, bfloat16\n")
    assert "- deepspeed: DeepSpeed is not installed." in text
    assert "- save-on-cpu: CUDA out of memory" in text
    assert "pyao-window: the method pyao-window" in text
    for part in (
        "Some GPU, driver 580.1",
        "link 24.0 GiB/s to the host, 25.0 to the device, 40.0 both together",
        "median of 3 steps after 2 warm-up steps",
        "`bench_offload.py --model opt:1.3b`",
        "commit 0123456789ab, source feedbeef",
        "torch 2.11.0",
        "seed 0, gradients keep",
        "Some CPU, 16 cores",
    ):
        assert part in text, part
    assert "trl None" not in text


def test_a_run_is_told_per_micro_batch() -> None:
    text = markdown_of(make_run())
    assert "| autograd would have held on the device | 10.00 MiB | 10.00 MiB |" in text
    assert "| backward waited for copies | 3.00 ms | 3.00 ms |" in text
    assert "| copies hidden under compute | 90% | 90% |" in text
    assert "| host memory reserved | 32.00 MiB | – |" in text
    assert "| last layer | 2.00 MiB |" in text
    assert "recomputed" not in text


def test_what_could_not_be_recomputed_is_told_with_the_reason_most_first() -> None:
    run = make_run()
    reasons = {"compiled code": 2 * 2**20, "sources are no smaller": 6 * 2**20, "unseen": 0}
    counted = {f"not_recomputed_bytes/{reason}": value for reason, value in reasons.items()}
    text = markdown_of(dataclasses.replace(run, totals={**run.totals, **counted}))
    told = text.partition("| to be recomputed, but kept or moved because |")[2].splitlines()
    assert told[2:4] == [  # of two micro-batches
        "| sources are no smaller | 3.00 MiB |",
        "| compiled code | 1.00 MiB |",
    ]
    assert "unseen" not in text
    assert "to be recomputed" not in markdown_of(run)


VIEW = View(
    title="three ways",
    summary="Take `b_1`: --activation_offload_policy auto. " * 3,
    tables=[
        Table(
            ["way to train it", "time, ms", "largest micro-batch", "why"],
            [["a name with many words", "12,345.6", "none", "–"], ["b_1", "7", "1,024", "x" * 30]],
        )
    ],
)


@pytest.mark.parametrize("width", [48, 64, 90])
def test_text_is_as_wide_as_the_terminal_and_figures_stay_whole(width: int) -> None:
    text = text_of_view(VIEW, width)
    assert max(map(len, text.splitlines())) <= width
    assert "12,345.6" in text and "1,024" in text
    assert (f"for {width} columns: why." in text) == (width < 90) == ("x" * 30 not in text)
    assert text.startswith("three ways\n\nTake `b_1`: --activation_offload_policy auto.")


def test_a_terminal_is_shown_text_and_a_file_gets_markdown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show_view(VIEW)
    assert "| b_1 | 7 | 1,024 |" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show_view(VIEW)
    said = capsys.readouterr().out
    assert "|" not in said and "\\" not in said and "b_1" in said
