"""The board: rounds, order, what is compared and counted, and its page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import board
from bench.board_peers import PEERS
from bench.board_report import BoardEntry, BoardReport, board_view, rows_of
from bench.board_trial import BoardBench, peak_of_step
from hf_pyao.plan.documents.bench import OK, UNAVAILABLE, BenchRow
from hf_pyao.tools.bench.measure import Bench
from hf_pyao.tools.bench.methods import find_method, known_methods
from hf_pyao.tools.bench.setup import BenchSetup, Trial
from hf_pyao.tools.bench.worker import make_bench, run_trial
from hf_pyao.tools.report.tables import markdown_of_view
from tests.helpers.documents import make_row
from tests.recipes.conftest import RECIPES
from tests.tools.bench.conftest import smoke_setup

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture(scope="session")
def setup() -> BenchSetup:
    return smoke_setup()


@pytest.fixture
def bench(setup: BenchSetup) -> Bench:
    return make_bench(setup, BoardBench)


def measured(bench: Bench, name: str, micro_batch: int = 2) -> BenchRow:
    return run_trial(bench, Trial(method=board.harness_name(name), micro_batch=micro_batch))


def entry(number: int, position: int, method: str, peak_mib: int = 8, **changes: Any) -> BoardEntry:
    figures = {"step_peak_bytes": peak_mib * MIB, "gradient_error": 0.0, **changes}
    row = make_row(method, 10.0 + number, None, **figures)
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


def test_checkpointing_needs_less_for_a_step_and_saved_copies_on_the_host_do_not_count(
    bench: Bench,
) -> None:
    rows = {
        name: measured(bench, name, micro_batch=4) for name in ("none", "checkpoint", "save-on-cpu")
    }
    peaks = {name: row.step_peak_bytes for name, row in rows.items()}
    assert all(row.status == OK for row in rows.values()), rows
    assert 0 < peaks["checkpoint"] < peaks["none"]  # type: ignore[operator]
    assert 0 < peaks["save-on-cpu"] < peaks["none"]  # type: ignore[operator]
    assert {row.gradient_error for row in rows.values()} == {0.0}
    assert len({row.gradient_digest for row in rows.values()}) == 1


# ---- what is compared --------------------------------------------------------------------------------


def test_a_method_with_wrong_gradients_is_told_by_how_much(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_pyao.tools.bench import peers

    to_host = peers._to_host

    def wrong(tensor: torch.Tensor) -> torch.Tensor:
        return to_host(tensor * 1.25 if tensor.is_floating_point() else tensor)

    monkeypatch.setattr(peers, "_to_host", wrong)
    row = measured(bench, "save-on-cpu")
    assert row.gradient_error is not None
    assert row.gradient_error > 0.1


@pytest.mark.parametrize("method", ["mezo", "zeroth-order"])
def test_another_algorithm_is_told_and_leaves_the_weights_as_they_were(
    bench: Bench, method: str
) -> None:
    before = {name: p.detach().clone() for name, p in bench.model.named_parameters()}
    row = measured(bench, method)
    assert (row.status, row.reason, row.algorithm) == (OK, "", "zeroth order")
    assert row.gradient_digest is None
    assert row.gradient_error is None
    assert row.step_peak_bytes
    total = sum(p.nbytes for p in bench.model.parameters())
    # The model's two layers are in two slots, whose weights are aligned.
    assert row.device_weight_bytes == pytest.approx(total, rel=0.05 * (method != "mezo"))
    for name, p in bench.model.named_parameters():
        assert torch.equal(p, before[name]), name


# ---- rounds and rows ---------------------------------------------------------------------------------


def test_a_row_has_the_spread_of_its_rounds() -> None:
    entries = [
        *(entry(number, 0, "none", 10) for number in range(3)),
        *(entry(number, 1, "less", 4 + number) for number in range(3)),
        *(entry(number, 2, "wrong", gradient_error=0.25 * number) for number in range(3)),
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
        self, setup: BenchSetup, trials: Sequence[Trial], *, timeout_s: float, server: str
    ) -> Iterator[BenchRow]:
        for trial in trials:
            if len(self.ran) == self._interrupt_after:
                raise KeyboardInterrupt
            self.ran.append(trial.method.removeprefix("bench.board_peers:"))
            refuses = trial.method in self._refuses
            yield refused(trial.method).row if refuses else entry(0, 0, trial.method).row


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    found = Trials(refuses=["trl-streams"])
    monkeypatch.setattr(board, "run_trials", found)
    monkeypatch.setattr(board, "probe", lambda device, *, with_speeds: ({"name": "CPU"}, {}, {}))
    return found


def test_the_board_has_every_method_that_one_would_train_with() -> None:
    methods = board.board_methods()
    assert methods[0] == "none"
    assert {*known_methods(), *PEERS} - {*methods} == board.NOT_ON_THE_BOARD
    for name in methods:
        assert find_method(board.harness_name(name)).install, name


# ---- the page ----------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_its_smoke_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "board.json"
    assert board.main(["--smoke", "--device", "cpu", "--output", str(path)]) == 0
    rows = {row.method: row for row in BoardReport.from_json_file(path).rows}
    for method in ("checkpoint", "sac", "save-on-cpu", "pyao-window"):
        assert rows[method].gradients == "equal bits", rows[method]
    assert rows["trl-streams"].status == UNAVAILABLE


@pytest.mark.parametrize("name", ["board_cpu", "board_zeroth_order_cpu"])
def test_the_page_has_the_board_of_the_result_file(name: str) -> None:
    page = (RECIPES.parent / "hf_pyao" / "tools" / "bench" / "README.md").read_text("utf-8")
    result = BoardReport.from_json_file(RECIPES / "results" / f"{name}.json")
    shown = page.split(f"{name}.json -->\n")[1].split("<!-- end of board -->")[0]
    assert shown.strip() == markdown_of_view(board_view(result)).partition("\n\n")[2].strip()
