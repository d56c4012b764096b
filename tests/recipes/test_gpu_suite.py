"""The GPU suite: its smoke run on a CPU, so that a rare GPU finds no typo, and its bookkeeping."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

import gpu_suite
from bench import gpu_parts
from bench.gpu_test_run import count_outcomes, files_with_gpu_tests
from hf_pyao.plan.documents.bench import (
    CRASHED,
    NOT_REACHED,
    OK,
    UNAVAILABLE,
    BenchReport,
    BenchRow,
    FactsReport,
)
from hf_pyao.plan.documents.schema import write_json
from hf_pyao.tools.bench import processes
from hf_pyao.tools.bench.processes import Deadline
from hf_pyao.tools.bench.setup import Trial
from hf_pyao.tools.report.kinds import read_document
from tests.recipes.conftest import RECIPES, REPOSITORY, run_once

CPU = {"device": "cpu", "name": "CPU", "memory_gib": None}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a whole smoke run."""
    command = (RECIPES / "gpu_suite.py", "--smoke", "--output", "results")
    folder, _ = run_once(tmp_path_factory, "gpu_suite", *command, timeout=600)
    return folder / "results"


@pytest.mark.thorough
def test_every_part_leaves_its_results(smoke: Path) -> None:
    assert sorted(path.name for path in smoke.glob("*.json")) == [
        *("bf16-llama.json", "cap-opt.json", "link.json", "ratio-gpt2.json", "tests.json"),
    ]
    assert "## Tests on the device" in (smoke / "summary.md").read_text(encoding="utf-8")
    assert len(list(smoke.glob("*.png"))) == 3


@pytest.mark.thorough
def test_every_test_for_a_device_was_tried(smoke: Path) -> None:
    document = read_document(smoke / "tests.json")
    assert isinstance(document, FactsReport)
    num_tests = sum(
        path.read_text(encoding="utf-8").count("\ndef test_")
        for path in (REPOSITORY / "tests" / "gpu").glob("test_*.py")
    )
    facts = document.facts
    assert facts["outcome"] == "passed"
    assert facts["num_passed"] + facts["num_skipped"] == num_tests > 10
    assert facts["num_skipped"] == 4, "flash attention and the allocator have no stand-in"
    assert facts["is_dry_run"] is True


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["cap-opt", "ratio-gpt2", "bf16-llama"])
def test_every_benchmark_has_a_row_for_each_method(smoke: Path, name: str) -> None:
    report = BenchReport.from_json_file(smoke / f"{name}.json")
    statuses = {row.method: row.status for row in report.rows}
    assert statuses.pop("trl-streams") == UNAVAILABLE
    assert set(statuses.values()) == {OK}
    assert report.is_search == name.startswith("cap")
    if not report.is_search:
        assert all(row.are_gradients_equal for row in report.rows if row.status == OK)


# ---- bookkeeping ---------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No process is started; returns the methods that would have been measured."""
    asked: list[str] = []

    def run_trials(setup: Any, trials: list[Trial], **options: Any) -> Iterator[BenchRow]:
        for trial in trials:
            row = BenchRow(method=trial.method, label=trial.method, micro_batch=2)
            if options["deadline"].left_s() <= 0:
                yield dataclasses.replace(row, status=NOT_REACHED)
                continue
            asked.append(trial.method)
            yield row

    monkeypatch.setattr(gpu_parts, "run_trials", run_trials)
    told = create_autospec(processes.probe, return_value=(CPU, {}, {}))  # called as the real one
    monkeypatch.setattr(processes, "probe", told)
    return asked


def _run(output: Path, *argv: str) -> int:
    return gpu_suite.main(["--smoke", "--part", "bf16", "--output", str(output), *argv])


def test_a_resumed_run_measures_what_is_missing(tmp_path: Path, measured: list[str]) -> None:
    assert _run(tmp_path, "--methods", "none", "checkpoint") == 0
    assert measured == ["none", "checkpoint"]
    measured.clear()
    assert _run(tmp_path, "--methods", "none", "pyao-layer", "--resume") == 0
    assert measured == ["pyao-layer"]
    rows = BenchReport.from_json_file(tmp_path / "bf16-llama.json").rows
    assert [row.method for row in rows] == ["none", "pyao-layer"]


def test_without_resume_all_is_measured_again(tmp_path: Path, measured: list[str]) -> None:
    assert _run(tmp_path, "--methods", "none") == 0
    assert _run(tmp_path, "--methods", "none") == 0
    assert measured == ["none", "none"]


@pytest.mark.parametrize("what", ["source", "setup", "schema"])
def test_results_of_something_else_are_measured_again(
    tmp_path: Path, measured: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(tmp_path, "--methods", "none") == 0
    path = tmp_path / "bf16-llama.json"
    report = BenchReport.from_json_file(path)
    changes: dict[str, Any] = {
        "source": {"provenance": dataclasses.replace(report.provenance, source_sha256="other")},
        "setup": {"setup": {**report.setup, "seed": 9}},
        "schema": {"schema_version": 99},
    }[what]
    write_json(path, dataclasses.replace(report, **changes))
    measured.clear()
    assert _run(tmp_path, "--methods", "none", "--resume") == 0
    assert measured == ["none"]
    said = {"source": "hf_pyao has changed", "setup": "", "schema": "schema_version 99"}[what]
    assert said in capsys.readouterr().out


def test_a_run_out_of_time_says_so_and_writes_no_empty_rows(
    tmp_path: Path, measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(tmp_path, "--time-budget", "0") == gpu_suite.CUT_SHORT
    assert measured == []
    assert "go on with --resume" in capsys.readouterr().out
    assert not (tmp_path / "bf16-llama.json").exists()


def test_tests_that_passed_are_not_run_again(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def run_gpu_tests(**options: Any) -> dict[str, Any]:
        calls.append(options)
        return {"outcome": outcome, "num_passed": 3}

    monkeypatch.setattr(gpu_parts, "run_gpu_tests", run_gpu_tests)
    argv = ["--smoke", "--part", "tests", "--output", str(tmp_path), "--resume"]
    outcome = "failed"
    assert gpu_suite.main(argv) == 1
    outcome = "passed"
    assert gpu_suite.main(argv) == 0
    assert gpu_suite.main(argv) == 0
    assert len(calls) == 2
    assert calls[0] == {"is_dry_run": True, "timeout_s": gpu_parts.TESTS_TIMEOUT_S}


def test_crashes_and_other_gradients_are_problems() -> None:
    rows = [
        BenchRow(method="none", label="", micro_batch=1),
        BenchRow(method="trl-streams", label="", micro_batch=1, are_gradients_equal=False),
        BenchRow(method="pyao-layer", label="", micro_batch=1, are_gradients_equal=False),
        BenchRow(method="checkpoint", label="", micro_batch=1, status=CRASHED, reason="why"),
    ]

    class Report:
        pass

    report: Any = Report()
    report.rows = rows
    assert gpu_parts.problems_of("cap-opt", report) == [
        "cap-opt: checkpoint crashed: why",
        "cap-opt: pyao-layer has other gradients than nothing",
    ]


def test_without_an_accelerator_it_refuses(
    measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_suite.main(["--part", "link"]) == 2
    assert "torch finds no accelerator here" in capsys.readouterr().err


def test_the_list_shows_the_paper_s_models_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_suite.main(["--list"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    names = [line.split()[0] for line in lines]
    assert [n for n in names if n in gpu_parts.PARTS] == ["tests", "link", "cap", "ratio", "bf16"]
    assert "cap-opt: opt 1.3b, 512 tokens, bfloat16, at most 12 GiB" in lines
    assert "ratio-gpt2: gpt2 0.8b, 512 tokens, float32" in lines
    assert "bf16-llama: llama 1.2b, 512 tokens, bfloat16" in lines


def test_an_unknown_method_is_refused_before_anything_runs(
    measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(tmp_path, "--methods", "nome") == 2
    assert "unknown method 'nome'" in capsys.readouterr().err


# ---- the tests' outcome --------------------------------------------------------------------------


def test_outcomes_are_counted() -> None:
    junit = """<testsuites><testsuite>
      <testcase classname="a" name="one"/>
      <testcase classname="a" name="two"><failure message="assert 1 == 2&#10;more"/></testcase>
      <testcase classname="a" name="three"><skipped message="x"/></testcase>
      <testcase classname="a" name="four"><error message=""/></testcase>
    </testsuite></testsuites>"""
    assert count_outcomes(junit) == {
        "outcome": "failed",
        "num_passed": 1,
        "num_failed": 2,
        "num_skipped": 1,
        "failures": ["a::two: assert 1 == 2", "a::four: no message"],
    }
    assert count_outcomes("<testsuites/>")["outcome"] == "none ran"


def test_files_with_gpu_tests_are_found(tmp_path: Path) -> None:
    for name, text in {
        "gpu/test_a.py": "pytestmark = pytest.mark.gpu",
        "codecs/test_b.py": "@pytest.mark.gpu",
        "codecs/test_c.py": "@pytest.mark.slow",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert files_with_gpu_tests(tmp_path, everywhere=False) == [str(tmp_path / "gpu/test_a.py")]
    assert len(files_with_gpu_tests(tmp_path, everywhere=True)) == 2


def test_a_deadline_counts_down() -> None:
    assert Deadline().left_s() == float("inf")
    assert 0 < Deadline.after(100.0).left_s() <= 100
    assert Deadline.after(-1.0).left_s() < 0
