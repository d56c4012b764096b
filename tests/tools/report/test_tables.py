"""Tables: a warning beside figures of a CPU, and text within a terminal."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from hf_pyao.plan.hardware.presets import OTHERS_TIMES
from hf_pyao.quantities import ABSENT
from hf_pyao.tools.report.tables import markdown_of
from hf_pyao.tools.report.terminal import show_view, text_of_view
from hf_pyao.tools.report.views.view import Table, View, others_columns
from tests.helpers.documents import make_bench


def test_a_cpu_s_figures_come_with_a_warning() -> None:
    report = make_bench()
    warning = "There was no device"
    assert warning not in markdown_of(report)
    on_cpu = dataclasses.replace(report, device={"name": "CPU", "memory_gib": None})
    assert warning in markdown_of(on_cpu)


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


def test_what_others_measured_on_a_card_stands_beside_predicted_times() -> None:
    columns = dict(others_columns("a100", lambda step_ms: step_ms))
    assert list(columns) == ["others' eager kernels, ms", "others' fused kernels, ms"]
    for show, kernels in zip(columns.values(), ("eager", "fused"), strict=True):
        least, most = OTHERS_TIMES["a100", kernels]
        assert show(2000.0) == f"{2000 * least:,.0f} to {2000 * most:,.0f}"
        assert show(None) == ABSENT
    assert not list(others_columns("rtx2050", lambda step_ms: step_ms))
