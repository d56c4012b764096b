"""The processes that estimate."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hf_pyao.plan.predictor.way import Way
from hf_pyao.tools.estimate import jobs as jobs_module
from hf_pyao.tools.estimate.jobs import Job, _start_method, all_jobs, run_jobs


def test_a_process_with_threads_of_its_own_is_not_forked() -> None:
    ended = threading.Event()
    alone = _start_method()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        assert _start_method() == "spawn"
    finally:
        ended.set()
        thread.join()
    if threading.active_count() == 1:
        assert alone == ("fork" if sys.platform == "linux" else "spawn")


class Row:
    def __init__(self, method: str) -> None:
        self.method = method


class MadeUp(Job):
    """A job whose ways are done at once, and need no packages."""

    def import_packages(self) -> None:
        pass

    def run(self, on_done: Any) -> tuple[list[Any], int]:
        for way in self.ways:
            on_done(way.name)
        return [Row(way.name) for way in self.ways], 1


@pytest.mark.parametrize("num_processes", [1, 2])
def test_each_way_is_told_and_rows_are_in_order(num_processes: int, tmp_path: Path) -> None:
    shared: dict[str, Any] = {"options": {}, "config": None, "hardware": None}
    jobs = [
        MadeUp(tuple(map(Way, names)), **dict.fromkeys(_others(Job)))
        for names in (("policy all", "none + chunked loss"), ("none",))
    ]
    told: list[str] = []
    rows, num_recordings = run_jobs(jobs, num_processes, told.append)
    assert [row.method for row in rows] == ["none", "policy all", "none + chunked loss"]
    assert num_recordings == 2
    assert sorted(told) == sorted(row.method for row in rows)
    assert len(all_jobs(micro_batch=None, with_longest=False, **shared)) == 4


class Slow(MadeUp):
    """A job that goes on for a while when its first way is done."""

    def run(self, on_done: Any) -> tuple[list[Any], int]:
        on_done("first")
        time.sleep(2)
        return [], 1


def test_an_interrupt_ends_the_processes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "POLL_SECONDS", 0.05)
    jobs = [Slow((), **dict.fromkeys(_others(Job))) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, 2, Mock(side_effect=KeyboardInterrupt))
    assert multiprocessing.active_children() == []


def _others(kind: type[Job]) -> list[str]:
    return [name for name in kind.__dataclass_fields__ if name != "ways"]
