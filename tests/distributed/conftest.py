"""Starts the two ranks, once for each group of scenarios."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.distributed.scenarios import WORLD_SIZE

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 300

Results = list[dict[str, dict[str, Any]]]
"""One per rank: scenario name -> what was seen."""

ResultsOf = Callable[[str], Results]
"""From the name of a group of scenarios."""


@pytest.fixture(scope="session")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> ResultsOf:
    """Return what gives the ranks' results, group by group; workers of pytest-xdist share a run."""
    is_shared = "PYTEST_XDIST_WORKER" in os.environ
    root = tmp_path_factory.getbasetemp()
    root = root.parent if is_shared else root

    @functools.cache
    def results_of(group: str) -> Results:
        folder = root / f"distributed_{group}"
        with FileLock(f"{folder}.lock"):
            if folder.exists():
                return _read(folder)
            folder.mkdir()
            return _run_ranks(folder, group)

    return results_of


def _run_ranks(folder: Path, group: str) -> Results:
    processes = [_start(folder, group, rank) for rank in range(WORLD_SIZE)]
    try:
        for process in processes:
            process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the ranks did not end within {TIMEOUT_S} s\n{_logs(folder)}", pytrace=False)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        codes = [process.returncode for process in processes]
        pytest.fail(f"the ranks ended with {codes}\n{_logs(folder)}", pytrace=False)
    return _read(folder)


def _start(folder: Path, group: str, rank: int) -> subprocess.Popen[bytes]:
    environment = {name: v for name, v in os.environ.items() if not name.startswith("PYAO_")}
    environment |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD_SIZE),
        "LOCAL_WORLD_SIZE": str(WORLD_SIZE),
        "CUDA_VISIBLE_DEVICES": "",  # two ranks on the CPU, also where there are accelerators
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]),
    }
    command = [sys.executable, "-m", "tests.distributed.worker", str(folder), group]
    with (folder / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _read(folder: Path) -> Results:
    paths = [folder / f"rank{rank}.json" for rank in range(WORLD_SIZE)]
    if not all(path.exists() for path in paths):
        pytest.fail(f"the ranks wrote no results\n{_logs(folder)}", pytrace=False)
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _logs(folder: Path) -> str:
    logs = sorted(folder.glob("rank*.log"))
    return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-4000:]}" for p in logs)
