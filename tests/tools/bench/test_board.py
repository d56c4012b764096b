"""The board: rounds, order, what is compared and counted, and its page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao.cli import main
from hf_pyao.plan.documents.bench import OK, UNAVAILABLE, BenchRow
from hf_pyao.plan.documents.board import BoardEntry, rows_of
from hf_pyao.tools.bench import board
from hf_pyao.tools.bench.arguments import INTERRUPTED
from hf_pyao.tools.bench.measure import Bench, largest_error
from hf_pyao.tools.bench.methods import known_methods
from hf_pyao.tools.bench.setup import BenchSetup, Trial
from hf_pyao.tools.bench.step_memory import peak_of_step
from hf_pyao.tools.bench.worker import run_trial
from hf_pyao.tools.report.kinds import figure_of, read_document
from hf_pyao.tools.report.plots.look import Look
from hf_pyao.tools.report.tables import markdown_of
from tests.helpers.documents import make_row

CPU = torch.device("cpu")
MIB = 2**20


def entry(number: int, position: int, method: str, peak_mib: int = 8, **changes: Any) -> BoardEntry:
    row = make_row(method, 10.0 + number, None, step_peak_bytes=peak_mib * MIB, **changes)
    return BoardEntry(round=number, position=position, row=row)


def refused(method: str) -> BoardEntry:
    row = BenchRow(
        method=method,
        label="a method",
        micro_batch=4,
        status=UNAVAILABLE,
        reason="it is not installed",
    )
    return BoardEntry(round=0, position=9, row=row)


# ---- what is counted ---------------------------------------------------------------------------------


def test_the_peak_is_of_what_is_allocated_at_once() -> None:
    def run() -> None:
        first = torch.empty(3 * MIB, dtype=torch.uint8)
        second = torch.empty(2 * MIB, dtype=torch.uint8)
        del first
        third = torch.empty(MIB, dtype=torch.uint8)
        del second, third

    assert peak_of_step(CPU, run) == 5 * MIB


def test_what_was_there_before_does_not_count_even_if_it_goes() -> None:
    held = [torch.empty(4 * MIB, dtype=torch.uint8)]

    def run() -> None:
        held.clear()
        held.append(torch.empty(3 * MIB, dtype=torch.uint8))

    assert peak_of_step(CPU, run) == 3 * MIB


def test_checkpointing_needs_less_for_a_step_and_saved_copies_on_the_host_do_not_count(
    bench: Bench,
) -> None:
    rows = {
        name: run_trial(bench, Trial(method=name, micro_batch=4, compares_values=True))
        for name in ("none", "checkpoint", "save-on-cpu")
    }
    peaks = {name: row.step_peak_bytes for name, row in rows.items()}
    assert all(row.status == OK for row in rows.values()), rows
    assert 0 < peaks["checkpoint"] < peaks["none"]  # type: ignore[operator]
    assert 0 < peaks["save-on-cpu"] < peaks["none"]  # type: ignore[operator]
    assert {row.gradient_error for row in rows.values()} == {0.0}
    assert len({row.gradient_digest for row in rows.values()}) == 1


# ---- what is compared --------------------------------------------------------------------------------


def test_the_error_is_that_of_the_worst_gradient() -> None:
    right = {"a": torch.full((4,), 2.0), "b": torch.ones(9)}
    near = {"a": torch.full((4,), 2.0), "b": torch.ones(9) * 1.5}
    assert largest_error(right, right) == 0.0
    assert largest_error(near, right) == pytest.approx(0.5)
    assert largest_error({"a": right["a"]}, right) == 1.0  # one is missing
    assert largest_error({**right, "c": torch.ones(1)}, right) == 1.0  # nobody expects one


def test_a_method_with_wrong_gradients_is_told_by_how_much(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_pyao.tools.bench import peers

    to_host = peers._to_host

    def wrong(tensor: torch.Tensor) -> torch.Tensor:
        return to_host(tensor * 1.25 if tensor.is_floating_point() else tensor)

    monkeypatch.setattr(peers, "_to_host", wrong)
    row = run_trial(bench, Trial(method="save-on-cpu", micro_batch=2, compares_values=True))
    assert row.gradient_error is not None
    assert row.gradient_error > 0.1


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_layers_with_a_budget_save_less_and_sum_in_another_order(bench: Bench) -> None:
    trials = [
        Trial(method=name, micro_batch=4, compares_values=True)
        for name in ("none", "memory-budget", "none")
    ]
    none, budget, again = [run_trial(bench, trial) for trial in trials]
    assert (budget.status, budget.reason) == (OK, "")
    assert budget.gradient_error is not None
    assert budget.gradient_error < 1e-5
    assert budget.step_peak_bytes < none.step_peak_bytes  # type: ignore[operator]
    assert again.gradient_digest == none.gradient_digest  # nothing stays compiled


# ---- rounds and rows ---------------------------------------------------------------------------------


def test_a_row_has_the_spread_of_its_rounds() -> None:
    entries = [
        *(entry(number, 0, "none", 10) for number in range(3)),
        *(entry(number, 1, "less", 4 + number) for number in range(3)),
        *(
            entry(number, 2, "wrong", gradient_digest="bbbb", gradient_error=0.25 * number)
            for number in range(3)
        ),
        refused("missing"),
    ]
    none, less, wrong, missing = rows_of(entries, ["none", "less", "wrong", "missing", "not run"])
    assert (none.gradients, less.gradients, wrong.gradients) == (
        "reference",
        "equal bits",
        "differ by 0.5",
    )
    assert less.step_peak_bytes is not None
    assert (less.step_peak_bytes.least, less.step_peak_bytes.most) == (4 * MIB, 6 * MIB)
    assert less.step_ms is not None
    assert less.step_ms.mean == 11.0
    assert (missing.status, missing.reason) == (UNAVAILABLE, "it is not installed")
    assert missing.step_ms is None


class Trials:
    """Stands for the processes: notes what runs, and fails as it is told."""

    def __init__(self, *, refuses: Sequence[str] = (), interrupt_after: int = 10**6) -> None:
        self.ran: list[str] = []
        self._refuses = refuses
        self._interrupt_after = interrupt_after

    def __call__(
        self, setup: BenchSetup, trials: Sequence[Trial], *, timeout_s: float
    ) -> Iterator[BenchRow]:
        for trial in trials:
            assert trial.compares_values
            if len(self.ran) == self._interrupt_after:
                raise KeyboardInterrupt
            self.ran.append(trial.method)
            refuses = trial.method in self._refuses
            yield refused(trial.method).row if refuses else entry(0, 0, trial.method).row


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    found = Trials(refuses=["trl-streams"])
    monkeypatch.setattr(board, "run_trials", found)
    monkeypatch.setattr(board, "probe", lambda device, *, with_speeds: ({"name": "CPU"}, {}, {}))
    return found


def test_each_round_has_all_methods_in_another_order(setup: BenchSetup, trials: Trials) -> None:
    methods = ["none", "checkpoint", "sac", "save-on-cpu", "pyao-window", "trl-streams"]
    report = board.run_board(setup, methods, micro_batch=2, num_rounds=3)
    rounds = [trials.ran[:6], trials.ran[6:11], trials.ran[11:]]
    assert sorted(rounds[0]) == sorted(methods)
    assert all(sorted(each) == sorted(methods[:-1]) for each in rounds[1:])  # it was refused once
    assert len({tuple(name for name in each if name != "trl-streams") for each in rounds}) > 1
    assert [row.method for row in report.rows] == methods
    again = board.run_board(setup, methods, micro_batch=2, num_rounds=3)
    assert [e.row.method for e in again.entries] == [e.row.method for e in report.entries]


def test_the_reference_is_added(setup: BenchSetup, trials: Trials) -> None:
    board.run_board(setup, ["checkpoint"], micro_batch=2, num_rounds=1)
    assert sorted(trials.ran) == ["checkpoint", "none"]


def test_an_interrupt_leaves_what_was_done(
    setup: BenchSetup, trials: Trials, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(board, "run_trials", Trials(interrupt_after=3))
    path = tmp_path / "board.json"
    argv = ["bench", "--board", "--smoke", "--device", "cpu", "--output", str(path)]
    assert main(argv) == INTERRUPTED
    assert len(read_document(path).entries) == 3


def test_the_board_has_every_method_that_one_would_train_with() -> None:
    methods = board.board_methods(tuple(known_methods()))
    assert methods[0] == "none"
    assert set(known_methods()) - set(methods) == board.NOT_ON_THE_BOARD
    ours = [name for name in methods if name.startswith("pyao")]
    assert len(set(methods) - set(ours)) >= 19


@pytest.mark.parametrize(
    ("flags", "keyword"),
    [
        (["--board", "--find-largest"], "--find-largest"),
        (["--board", "--gradients", "release"], "--gradients"),
        (["--rounds", "2"], "--board"),
        (["--board", "--rounds", "0"], "--rounds"),
    ],
)
def test_options_that_do_not_go_together(
    flags: list[str], keyword: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--smoke", "--device", "cpu", *flags]) != 0
    assert keyword in capsys.readouterr().err


# ---- the page ----------------------------------------------------------------------------------------


def test_the_page_says_what_ran_and_what_did_not(setup: BenchSetup, trials: Trials) -> None:
    report = board.run_board(setup, ["checkpoint", "trl-streams"], micro_batch=2, num_rounds=2)
    text = markdown_of(report)
    assert "| none | reference |" in text
    assert "| checkpoint | equal bits |" in text
    assert "trl-streams: cannot run here. it is not installed." in text
    assert "say nothing about a GPU" in text


@pytest.mark.parametrize("look", [Look(), Look(is_dark=True, is_narrow=True)])
def test_its_plot_has_a_point_or_a_bar_for_each_measured_method(
    setup: BenchSetup, trials: Trials, look: Look
) -> None:
    pytest.importorskip("matplotlib")
    report = board.run_board(setup, ["checkpoint", "trl-streams"], micro_batch=2, num_rounds=2)
    figure = figure_of(report, look)
    assert figure is not None
    axes = figure.axes[0]
    shown = " ".join(text.get_text() for text in (*axes.texts, *axes.get_yticklabels()))
    assert "checkpoint" in shown
    assert "trl-streams" not in shown


@pytest.mark.thorough
def test_its_smoke_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "board.json"
    argv = ["bench", "--board", "--smoke", "--device", "cpu", "--output", str(path)]
    assert main(argv) == 0
    rows = {row.method: row for row in read_document(path).rows}
    for method in ("checkpoint", "sac", "save-on-cpu", "pyao-window"):
        assert rows[method].gradients == "equal bits", rows[method]
    assert rows["trl-streams"].status == UNAVAILABLE


def test_modules_are_put_back_after_a_patch() -> None:
    from hf_pyao.tools.bench.board_peers import _replaced_forwards, _same_attributes

    model = nn.Sequential(nn.Linear(2, 2))
    before = dict(vars(model[0]))
    with _same_attributes(model), _replaced_forwards({model[0]: lambda x: x * 2}):
        model[0].extra = 1  # type: ignore[assignment]
        assert model(torch.ones(2)).tolist() == [2.0, 2.0]
    assert dict(vars(model[0])) == before


@pytest.mark.parametrize("name", ["board_cpu", "board_zeroth_order_cpu"])
def test_the_page_has_the_board_of_the_result_file(name: str) -> None:
    page = Path(board.__file__).with_name("README.md").read_text(encoding="utf-8")
    result = Path(__file__).parents[3] / "recipes" / "results" / f"{name}.json"
    shown = page.split(f"{name}.json -->\n")[1].split("<!-- end of board -->")[0]
    assert shown.strip() == markdown_of(read_document(result)).partition("\n\n")[2].strip()
