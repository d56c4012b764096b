"""A trial that hangs or takes its process down costs one row, and the rest go on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_pyao.errors import ConfigError
from hf_pyao.plan.documents.bench import CRASHED, OK, TIMED_OUT
from hf_pyao.tools.bench import processes
from hf_pyao.tools.bench.processes import run_trials
from hf_pyao.tools.bench.setup import BenchSetup, Trial

SERVERS = "tests.tools.bench.servers"


@pytest.fixture(autouse=True)
def _no_preload(monkeypatch: pytest.MonkeyPatch) -> None:
    """These processes need no imports that take seconds."""
    monkeypatch.setattr(processes, "PRELOAD", [])


def _trials(*methods: str) -> list[Trial]:
    return [Trial(method=method, micro_batch=2) for method in methods]


@pytest.mark.thorough
def test_crashes_and_hangs_are_rows_and_the_rest_go_on(setup: BenchSetup) -> None:
    methods = ("none", "checkpoint", "pyao-window", "pyao-layer", "pyao-modules", "save-on-cpu")
    rows = list(run_trials(setup, _trials(*methods), timeout_s=3.0, server=f"{SERVERS}:misbehave"))
    assert [row.method for row in rows] == list(methods)
    assert [row.status for row in rows] == [OK, CRASHED, OK, TIMED_OUT, OK, CRASHED]
    killed, hung, ended = rows[1].reason, rows[3].reason, rows[5].reason
    assert "SIGKILL (the system's way to say that host memory ran out)" in killed
    assert killed.endswith("starting | a segmentation fault")
    assert hung == "stopped after 3 s"
    assert ended.startswith("exit status 7")
    workers = [row.label for row in rows if row.status == OK]
    assert len(set(workers)) == 3, "a process for each"
    assert str(os.getpid()) not in workers


@pytest.mark.thorough
def test_no_model_is_an_error_that_says_so(setup: BenchSetup) -> None:
    with pytest.raises(ConfigError, match="no such model"):
        list(run_trials(setup, _trials("none"), timeout_s=60, server=f"{SERVERS}:break_down"))


@pytest.mark.thorough
def test_a_process_that_dies_while_building_costs_its_row(setup: BenchSetup) -> None:
    trials = _trials("none", "checkpoint")
    rows = list(run_trials(setup, trials, timeout_s=60, server=f"{SERVERS}:die_early"))
    assert [row.status for row in rows] == [CRASHED, CRASHED]
    assert rows[1].reason.startswith("exit status 3")


@pytest.mark.thorough
def test_processes_can_be_started_without_a_fork(
    setup: BenchSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(processes.START_METHOD_VARIABLE, "spawn")
    trials = _trials("none", "checkpoint")
    rows = list(run_trials(setup, trials, timeout_s=60, server=f"{SERVERS}:misbehave"))
    assert [row.status for row in rows] == [OK, CRASHED]


@pytest.mark.thorough
def test_what_is_imported_before_the_fork_touches_no_device() -> None:
    program = """
import torch
asked = []
def watch(module, name):
    function = getattr(module, name)
    def watched(*args, **kwargs):
        asked.append(name)
        return function(*args, **kwargs)
    setattr(module, name, watched)
for name in ("is_available", "device_count", "_lazy_init"):
    watch(torch.cuda, name)
for name in ("is_available", "device_count"):
    watch(torch.accelerator, name)
import hf_pyao.tools.bench.preload
print(asked, torch.cuda.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[] False", done.stderr


@pytest.mark.thorough
def test_no_log_is_left(setup: BenchSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    list(run_trials(setup, _trials("none"), timeout_s=60, server=f"{SERVERS}:misbehave"))
    assert [path for path in tmp_path.iterdir() if path.suffix == ".log"] == []
