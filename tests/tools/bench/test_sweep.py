"""Sweeps over budgets: what is asked for, what is measured, and what is made of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from hf_pyao import PyAOConfig, attach, cli
from hf_pyao.errors import ConfigError
from hf_pyao.plan.documents.bench import OK, OUT_OF_MEMORY, BenchRow, StepTimes
from hf_pyao.plan.documents.sweep import BYTES, TENSORS, SweepPoint, SweepReport
from hf_pyao.plan.paper.sweep import Budgets, order_of, parse_budgets, with_points
from hf_pyao.tools.bench import sweep
from hf_pyao.tools.bench.arguments import SMOKE_MODEL
from hf_pyao.tools.bench.measure import Bench
from hf_pyao.tools.bench.pack_clock import PackClock
from hf_pyao.tools.bench.setup import BenchSetup, Trial
from hf_pyao.tools.bench.sweep import SweepPlan, run_sweep
from hf_pyao.tools.bench.worker import run_trial
from hf_pyao.tools.report.kinds import figure_of, read_document
from hf_pyao.tools.report.tables import markdown_of

MIB = 2**20

# ---- budgets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values", "are"),
    [
        ("0,1,2,4,8", (0, 1, 2, 4, 8), TENSORS),
        ("8, 4,4", (0, 4, 8), TENSORS),
        ("0:12:4", (0, 4, 8, 12), TENSORS),
        ("3:5", (0, 3, 4, 5), TENSORS),
        ("0", (0,), TENSORS),
        ("0,2MiB,1MiB", (0, MIB, 2 * MIB), BYTES),
        ("1KB", (0, 1000), BYTES),
    ],
)
def test_budgets_are_read(text: str, values: tuple[int, ...], are: str) -> None:
    assert parse_budgets(text) == Budgets(values, are)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--budgets is empty"),
        (",", "--budgets is empty"),
        ("1,,2", "nothing between two commas"),
        ("1,-2", "'-2'; a budget cannot be negative"),
        ("-1MiB", "cannot be negative"),
        ("1,2MiB", "mixes numbers of tensors and sizes"),
        ("1.5", "expected a whole number of tensors"),
        ("many", "expected a whole number of tensors"),
        ("4:0:1", "0 <= first <= last"),
        ("0:8:0", "a step of 1 or more"),
        ("-4:8:2", "0 <= first <= last"),
        ("0:8:2:1", "a range such as 0:48:4"),
        ("0:x", "a range such as 0:48:4"),
        ("0:100000", "100,001 budgets; expected 1000 at most"),
    ],
)
def test_bad_budgets_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_budgets(text)
    assert message in str(caught.value)


def test_the_order_is_shuffled_and_begins_and_ends_with_none() -> None:
    budgets = parse_budgets("0:20:1")
    orders = [order_of(budgets, seed, 0) for seed in range(5)]
    for order in orders:
        assert (order[0], order[-1]) == (0, 0)
        assert sorted(order[1:-1]) == list(range(1, 21)) != order[1:-1]
    assert len({tuple(order) for order in orders}) == 5
    assert order_of(budgets, 3, 0) == orders[3] != order_of(budgets, 3, 1)


# ---- points --------------------------------------------------------------------------------------


def _made_up(setup: BenchSetup, trials: Sequence[Trial], **_: Any) -> Iterator[BenchRow]:
    """Return rows of a sweep: budget 7 has no memory, and budget 9 other gradients."""
    for trial in trials:
        assert trial.times_packs
        budget = int(trial.method.removeprefix("pyao:policy=budget,budget="))
        row = BenchRow(method=trial.method, label="", micro_batch=trial.micro_batch)
        if budget == 7:
            yield dataclasses.replace(row, status=OUT_OF_MEMORY, reason="CUDA out of memory.")
            continue
        tokens_per_s = 1000.0 - budget - setup.seed
        yield dataclasses.replace(
            row,
            step=StepTimes.of([1e3 / tokens_per_s], 0),
            tokens_per_s=tokens_per_s,
            rss_growth_bytes=10,
            loss=float(setup.seed),
            gradient_digest=f"{setup.seed} {budget == 9}",
            metrics={"held_bytes": 1e6 - 1e3 * budget, "pack_ms": 0.5, "offloaded_bytes": 8.0},
        )


@pytest.fixture
def plan(setup: BenchSetup, monkeypatch: pytest.MonkeyPatch) -> SweepPlan:
    """Two seeds of four budgets, of which the last ends out of memory; no process measures."""
    monkeypatch.setattr(sweep, "run_trials", _made_up)
    facts = {"device": "cpu", "name": "CPU"}, {}, {}
    monkeypatch.setattr(sweep, "probe", create_autospec(sweep.probe, return_value=facts))
    budgets = parse_budgets("0,1,5,7")
    return SweepPlan(setup=setup, budgets=budgets, micro_batch=2, num_seeds=2)


@pytest.mark.thorough
def test_points_become_rows(plan: SweepPlan, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    report = run_sweep(plan, output=path)
    assert read_document(path) == report
    assert len(report.points) == report.num_planned == plan.num_points == 10
    assert [row.budget for row in report.rows] == [0, 1, 5, 7]
    none, one, _, last = report.rows
    assert none.tokens_per_s is not None
    assert (none.tokens_per_s.num_figures, none.tokens_per_s.mean) == (4, 999.5)
    assert (none.tokens_per_s.least, none.tokens_per_s.most) == (999.0, 1000.0)
    assert one.tokens_per_s is not None
    assert one.tokens_per_s.standard_deviation == pytest.approx(0.5**0.5)
    assert one.memory_bytes is not None
    assert (one.memory_bytes.mean, one.memory_bytes.standard_deviation) == (999e3, 0.0)
    assert (last.status, last.reason) == (
        OUT_OF_MEMORY,
        "out of memory (2 of 2): CUDA out of memory.",
    )
    assert last.memory_bytes is None
    assert report.drift == [0.0, 0.0]
    assert (report.are_losses_equal, report.are_gradients_equal) == (True, True)
    assert report.knee is None
    assert "nothing that can be told" in report.knee_reason
    text = markdown_of(report)
    assert "gradients do not depend on the budget" in text
    assert "The least memory, 0.9 MiB, is at 5 tensors." in text
    assert "| 7 | out of memory |" in text
    assert figure_of(report) is not None


def test_gradients_that_depend_on_the_budget_are_shouted(plan: SweepPlan) -> None:
    report = run_sweep(dataclasses.replace(plan, budgets=parse_budgets("0,9")))
    assert (report.are_losses_equal, report.are_gradients_equal) == (True, False)
    assert "GRADIENTS DIFFER between budgets" in markdown_of(report)


def test_an_interrupt_leaves_what_is_done(plan: SweepPlan, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    seen: list[SweepPoint] = []

    def on_point(point: SweepPoint) -> None:
        seen.append(point)
        if len(seen) == 3:
            raise KeyboardInterrupt

    report = run_sweep(plan, output=path, on_point=on_point)
    assert report.points == seen
    assert read_document(path) == report
    assert "interrupted: 3 of 10 points are done" in markdown_of(report)


def test_an_interrupted_command_says_so(
    plan: SweepPlan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    report = run_sweep(plan)
    cut = with_points(report, report.points[:3])
    monkeypatch.setattr(sweep, "run_sweep", lambda plan, **_: cut)
    argv = ["sweep", "--model", SMOKE_MODEL, "--output", str(tmp_path / "a.json")]
    assert cli.main(argv) == 130
    assert "interrupted after 3 of 10 points" in capsys.readouterr().err


# ---- measuring -----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_pack_hooks_are_timed_when_asked_for_alone(bench: Bench) -> None:
    method = "pyao:policy=budget,budget=4,min_bytes=1"
    timed = run_trial(bench, Trial(method=method, micro_batch=2, times_packs=True))
    assert (timed.status, timed.reason) == (OK, "")
    assert timed.step is not None
    assert 0 < timed.metrics["pack_ms"] < timed.step.median_ms
    plain = run_trial(bench, Trial(method=method, micro_batch=2))
    assert "pack_ms" not in plain.metrics
    assert plain.gradient_digest == timed.gradient_digest


def test_the_clock_leaves_the_hooks_as_they_were(bench: Bench) -> None:
    ids = torch.ones(1, 4, dtype=torch.int64)
    with attach(bench.model, PyAOConfig(policy="off")) as offloader:
        engine = offloader.engine
        before = engine.pack
        with PackClock(engine) as clock:
            bench.model(input_ids=ids, labels=ids).loss.backward()
        assert engine.pack == before
        elapsed_ms = clock.elapsed_ms
        bench.model(input_ids=ids, labels=ids).loss.backward()
        assert clock.elapsed_ms == elapsed_ms > 0


@pytest.mark.thorough
def test_budgets_go_over_what_checkpointing_leaves(bench: Bench) -> None:
    def offloaded(prefix: str, budget: int) -> float:
        method = f"{prefix}pyao:policy=budget,budget={budget},min_bytes=1,keep_last_layers=0"
        row = run_trial(bench, Trial(method=method, micro_batch=2))
        assert (row.status, row.reason) == (OK, "")
        assert row.label.startswith(f"hf_pyao{' over checkpointing' * bool(prefix)}, policy=budget")
        return row.metrics["offloaded_bytes"]

    layer_input_bytes = 2 * 16 * 32 * 4
    assert [offloaded("checkpoint+", k) for k in (0, 1, 2, 3)] == [
        layer_input_bytes * k for k in (0, 1, 2, 2)
    ]
    assert offloaded("", 9) > 2 * layer_input_bytes


@pytest.mark.thorough
def test_a_sweep_is_measured(tmp_path: Path, capsys: Any) -> None:
    """Of a model whose last layer stays: the more tensors leave, the less is held."""
    path = tmp_path / "sweep.json"
    argv = [
        *("sweep", "--model", SMOKE_MODEL, "--budgets", "0,2,6", "--seeds", "2", "--device", "cpu"),
        *("--sequence-length", "16", "--micro-batch", "2", "--steps", "2", "--warmup", "1"),
        *("--dtype", "float32", "--min-bytes", "1", "--output", str(path)),
    ]
    assert cli.main(argv) == 0
    assert "gradients do not depend on the budget" in capsys.readouterr().out
    report = read_document(path)
    assert isinstance(report, SweepReport)
    held = [row.memory_bytes.mean for row in report.rows if row.memory_bytes]
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == 3
    assert all(row.pack_ms and row.pack_ms.mean > 0 for row in report.rows)
    assert report.are_losses_equal
    assert report.are_gradients_equal
    assert len(report.drift) == 2
    assert cli.main(["report", str(path), "-o", str(tmp_path / "sweep.html")]) == 0


# ---- predicting, and the command line ------------------------------------------------------------

PREDICT = [
    *("sweep", "--model", SMOKE_MODEL, "--predict", "--sequence-length", "16"),
    *("--min-bytes", "1", "--micro-batch", "2"),
]


@pytest.mark.thorough
def test_a_sweep_is_predicted(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "sweep.json"
    argv = [*PREDICT, "--budgets", "0,1,2,99", "--device", "h100", "--json", "--output", str(path)]
    assert cli.main([*argv, "--window", "layer"]) == 0
    printed = json.loads(capsys.readouterr().out)
    report = read_document(path)
    assert isinstance(report, SweepReport)
    assert report.to_dict() == printed
    assert not report.is_measured and report.setup["window"] == "layer"
    assert [point.budget for point in report.points] == [0, 1, 2, 99]
    offloaded = [point.offloaded_bytes or 0 for point in report.points]
    assert offloaded == sorted(offloaded)
    assert offloaded[0] == 0
    assert all(p.seed is None and p.step_ms and p.memory_bytes for p in report.points)
    text = markdown_of(report)
    assert "Predicted; no model ran" in text
    assert "on h100" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--budgets", ""], "--budgets is empty"),
        (["--budgets", "1,-1"], "cannot be negative"),
        (["--seeds", "0"], "--seeds is 0; expected 1 or more"),
        (["--steps", "0"], "--steps is 0; expected 1 or more"),
        (["--timeout", "0"], "--timeout is 0; expected more than 0 seconds"),
        (["--device", "rtx4070"], "names a card, and this sweep is measured"),
        (["--device", "tpu9"], "device is 'tpu9'"),
        (["--link", "1GiB/s"], "--link describe a card that is predicted"),
        (["--predict", "--seeds", "2"], "--seeds would change nothing with --predict"),
        (["--predict", "--device", "rtx407"], "did you mean 'rtx4070'?"),
        (["--predict", "--dtype", "float32"], "Give --tflop-per-s"),
        (["--predict", "--tflop-per-s", "-1"], "--tflop-per-s is -1"),
        (["--predict", "--micro-batch", "0"], "--micro-batch is 0; expected 1 or more"),
        (["--predict", "--sequence-length", "65"], "the model has 64 positions"),
        (["--predict", "--min-bytes", "few"], "--min-bytes is 'few'"),
        (["--predict", "--window", "wide"], "--window is 'wide'"),
        (["--min-bytes", "few", "--device", "cpu"], "--min-bytes is 'few'"),
    ],
)
def test_bad_options_are_one_line(argv: list[str], message: str, capsys: Any) -> None:
    given = "gpt2:n_positions=64,n_embd=8,n_layer=1,n_head=1,vocab_size=16"
    model = given if "65" in argv else SMOKE_MODEL
    assert cli.main(["sweep", "--model", model, *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pyao: ")
    assert message in error
    assert len(error.splitlines()) == 1
