"""The GPU day: what a part that fails costs, what is kept, and a whole day on a CPU."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any

import pytest

import gpu_day
from hf_pyao.plan.documents.bench import CRASHED, NOT_REACHED, OK, OUT_OF_MEMORY, TIMED_OUT
from hf_pyao.tools.bench import processes
from on_gpu import day, parts
from on_gpu.day import Deadline, Journal, Line, problems_of, read_lines, run_part, run_parts
from on_gpu.measure import Lab, measure
from on_gpu.page import page_of
from on_gpu.parts import PARTS, Request
from on_gpu.rows import all_rows, cap_rows, smoke
from on_gpu.tasks import hidden_copies
from tests.recipes.conftest import RECIPES, REPOSITORY, run_once


def ok(name: str, **figures: Any) -> Line:
    return {"name": name, "status": OK, "figures": figures}


def request_for(folder: Path, part: str = "A", limit_s: float = 60.0) -> Request:
    return Request(part=part, device="cpu", is_smoke=False, output=folder, limit_s=limit_s)


@pytest.fixture
def _fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are processes that fail, and import nothing."""
    monkeypatch.setattr(processes, "PRELOAD", [])
    monkeypatch.setattr(day, "SERVE", "tests.recipes.day_servers:serve")


# ---- processes -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("_fails")
def test_a_process_that_dies_costs_its_task_and_one_that_hangs_its_part(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "day.jsonl", lambda line: None)
    assert not run_part(request_for(tmp_path, limit_s=6.0), journal, lambda line: None)
    found = {line["name"]: line["status"] for line in read_lines(tmp_path)}
    assert found == {
        **{"first": OK, "killed": CRASHED, "second": OK, "exits": CRASHED, "third": OK},
        "hangs": TIMED_OUT,
    }
    used = [line["figures"]["process"] for line in journal.lines if line["status"] == OK]
    assert len(set(used)) == 3, "each death means a new process, and no other one is left"


@pytest.mark.usefixtures("_fails")
def test_a_part_that_cannot_begin_costs_no_other_part(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "day.jsonl", lambda line: None)
    done = [ok(name) for name in ("killed", "exits", "hangs")]
    for line in done:
        journal.add(line)
    asked = request_for(tmp_path)
    assert run_parts(["B", "A"], asked, journal, Deadline.after(60), lambda line: None)
    found = {line["name"]: line["status"] for line in read_lines(tmp_path)}
    assert found["B"] == CRASHED
    assert [found[name] for name in ("first", "second", "third", "fourth")] == [OK] * 4


# ---- what is written -----------------------------------------------------------------------------


def test_a_full_folder_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    journal = Journal(tmp_path / "day.jsonl", said.append)
    journal.add(ok("before", step_ms=1.5))
    real_open = Path.open

    def full(path: Path, mode: str = "r", **options: Any) -> Any:
        if path.name == "day.jsonl" and mode == "a":
            with real_open(path, mode) as file:
                file.write('{"name": "torn')
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_open(path, mode, **options)

    monkeypatch.setattr(Path, "open", full)
    journal.add(ok("meanwhile", step_ms=2.5))
    assert "No space left" in said[-1]
    assert "2.5" in said[-1], "whoever keeps the output has the figure"
    monkeypatch.setattr(Path, "open", real_open)
    journal.add(ok("after"))
    assert [line["name"] for line in read_lines(tmp_path)] == ["before", "meanwhile", "after"]


def test_a_second_folder_has_the_first_and_measures_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, frozenset[str]]] = []

    def run_part(request: Request, journal: Journal, progress: Any) -> bool:
        asked.append((request.part, journal.done))
        journal.add(ok(f"{request.part}: new"))
        return True

    monkeypatch.setattr(day, "run_part", run_part)
    device = {"device": "cpu", "name": "CPU"}
    monkeypatch.setattr(processes, "probe", lambda name, with_speeds: (device, {}, {}))
    first, second = tmp_path / "first", tmp_path / "second"
    argv = ["--smoke", "--parts", "E", "J", "--output"]
    assert gpu_day.main([*argv, str(first)]) == 0
    before = read_lines(first)
    journal = Journal(first / "day.jsonl", lambda line: None)
    journal.add({"name": "E: crashed", "status": CRASHED, "reason": "x"})
    argv = ["--smoke", "--parts", "M", "--resume", str(first), "--output", str(second)]
    assert gpu_day.main(argv) == 1, "the crash of the first day is said again"
    assert asked[-1] == ("M", frozenset({"about", "E: new", "J: new"}))
    names = [line["name"] for line in read_lines(second)]
    assert names == ["about", "E: new", "J: new", "E: crashed", "about", "M: new"]
    assert read_lines(first)[: len(before)] == before
    assert "E: crashed: crashed: x" in capsys.readouterr().out
    assert sorted(path.name for path in second.iterdir()) == ["day.jsonl", "day.md", "log.txt"]


def test_what_must_not_be_is_named() -> None:
    expected = {"name": "b", "status": OUT_OF_MEMORY, "was_expected_to_run_out": True}
    lines: list[Line] = [
        ok("a", is_right=True),
        expected,
        {"name": "c", "status": OUT_OF_MEMORY, "reason": "r"},
        ok("d", is_right=False),
        {"name": "e", "status": CRASHED, "reason": "killed"},
        {"name": "f", "status": NOT_REACHED},
    ]
    found = problems_of(lines)
    assert [line.partition(":")[0] for line in found] == ["c", "d", "e"]
    journal = Journal(Path("unused"), lambda line: None)
    journal.lines += lines
    assert journal.done == {"a", "b"}, "what is wrong is measured again"


# ---- the plan of the day -------------------------------------------------------------------------


def test_auto_settles_on_small_batches_before_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until there is a plan everything is offloaded, which need not fit at the plan's own size."""
    row = next(row for row in cap_rows("G") if row.way == "auto + chunked")
    settings = {**row.settings, "min_bytes": 0}
    row = dataclasses.replace(smoke(row), micro_batch=20, cap_gib=row.cap_gib, settings=settings)
    lab = Lab.on("cpu", is_smoke=True)
    monkeypatch.setattr(lab.memory, "cap", lambda cap_gib: None)
    sizes: list[int] = []
    model = lab.model(row)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    figures = measure(row, lab)
    assert sizes == [8] * (len(sizes) - 2) + [20, 20], "a warm-up that plans, and a step"
    assert len(sizes) > 4
    assert figures["num_warmup"] == len(sizes) - 1
    assert figures["mode"] in ("following", "checking")


def test_without_an_accelerator_it_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = {"device": "cpu", "name": "CPU"}
    monkeypatch.setattr(processes, "probe", lambda name, with_speeds: (device, {}, {}))
    assert gpu_day.main(["--parts", "A", "--output", str(tmp_path)]) == 2
    assert "torch finds no accelerator here" in capsys.readouterr().err
    assert gpu_day.main(["--resume", str(tmp_path / "none"), "--output", str(tmp_path)]) == 2
    assert "has no day.jsonl" in capsys.readouterr().err


# ---- figures -------------------------------------------------------------------------------------


def test_copies_beside_kernels_are_hidden() -> None:
    def event(kind: str, start: float, elapsed: float, name: str = "k") -> dict[str, Any]:
        return {"cat": kind, "ph": "X", "ts": start, "dur": elapsed, "name": name}

    events = [
        event("kernel", 0, 1000),
        event("kernel", 500, 1000),  # on another stream
        event("kernel", 2000, 1000),
        event("gpu_memcpy", 1000, 1000, "Memcpy DtoH (Device -> Pinned)"),
        event("gpu_memcpy", 0, 500, "Memcpy DtoD (Device -> Device)"),
        {"cat": "cpu_op", "ph": "i", "ts": 0, "name": "x"},
    ]
    assert hidden_copies(events) == {
        **{"copies_ms": 1.0, "kernels_ms": 2.5, "gaps_ms": 0.5, "hidden_share": 0.5}
    }


def test_the_page_in_the_repository_has_predictions_for_both_cards() -> None:
    document = json.loads(gpu_day.PREDICTIONS.read_text(encoding="utf-8"))
    names = {row.name for row in all_rows()}
    for card in ("h100", "h200"):
        assert set(document["predictions"][card]) == names
    page = gpu_day.PAGE.read_text(encoding="utf-8")
    assert page == page_of(*gpu_day.page_input([]))


# ---- a whole day ---------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_whole_day_on_a_cpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    command = (RECIPES / "gpu_day.py", "--smoke", "--output", "results")
    folder, _ = run_once(tmp_path_factory, "gpu_day", *command, timeout=1800)
    results = folder / "results"
    assert sorted(path.name for path in results.iterdir()) == [
        *("day.jsonl", "day.md", "log.txt", "tests.txt", "trace.json.gz"),
    ]
    lines = {line["name"]: line for line in read_lines(results)}
    assert problems_of(lines.values()) == []
    assert set(PARTS) == {name.partition(":")[0] for name in lines} - {"about"}
    tests = lines["N: tests"]["figures"]
    num_tests = sum(
        path.read_text(encoding="utf-8").count("\ndef test_")
        for path in (REPOSITORY / "tests" / "gpu").glob("test_*.py")
    )
    assert tests["num_passed"] + tests["num_skipped"] >= num_tests > 10
    assert parts.REPOSITORY == REPOSITORY
