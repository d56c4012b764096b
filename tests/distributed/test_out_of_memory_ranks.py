"""One of two ranks runs out of memory: it goes on alone, or both end, and none waits for a timeout."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import REPOSITORY

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

TIMEOUT_S = 240
WITHIN_S = 60


def run(
    folder: Path,
    case: str,
    *,
    waits_for: tuple[int, ...] = (0, 1),
    module: str = "tests.distributed.memory_worker",
) -> list[dict[str, Any]]:
    """Run two ranks; return what each saw, and how long after the other it ended."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        environment = {name: v for name, v in os.environ.items() if not name.startswith("PYAO_")}
        environment |= {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]),
        }
        command = [sys.executable, "-m", module, str(folder), case]
        with (folder / f"rank{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        for rank in waits_for:
            processes[rank].wait(TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = "\n".join(p.read_text(errors="replace")[-3000:] for p in sorted(folder.glob("*.log")))
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), logs
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    assert not any("other" in facts for facts in found), f"{found}\n{logs}"
    for facts, file in zip(found, sorted(folder.glob("*.log")), strict=True):
        facts["log"] = file.read_text(errors="replace")
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found = run(tmp_path_factory.mktemp("undisturbed"), "nothing")
    assert found[0]["digest"] == found[1]["digest"]
    assert found[0]["tightened"] == found[1]["tightened"] == 0
    return found


@pytest.mark.parametrize(
    "case",
    [
        "backward without exchange",
        "backward without exchange, context inside",
        pytest.param("forward without exchange", marks=pytest.mark.thorough),
        pytest.param("forward of the exchange", marks=pytest.mark.thorough),
    ],
)
def test_a_rank_runs_its_micro_batch_again_alone(
    case: str, tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    found = run(tmp_path, case)
    assert [facts["tightened"] for facts in found] == [0, 1]
    assert found[1]["num_left"] == 0
    assert [facts["digest"] for facts in found] == [facts["digest"] for facts in undisturbed]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("backward of the exchange", "DistributedDataParallel has begun|begun to exchange"),
        pytest.param(
            "backward of the exchange, context inside",
            "DistributedDataParallel has begun|begun to exchange",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "backward without exchange, after the first",
            "begun to exchange data with other ranks",
            marks=pytest.mark.thorough,
        ),
        pytest.param("ever", "nothing tighter is left", marks=pytest.mark.thorough),
        pytest.param(
            "forward with buffers",
            "begun to exchange data with other ranks",
            marks=pytest.mark.thorough,
        ),
        pytest.param("ever, and stays", "nothing tighter is left", marks=pytest.mark.thorough),
    ],
)
def test_all_ranks_end_with_the_message(case: str, reason: str, tmp_path: Path) -> None:
    began = time.monotonic()
    first, second = run(tmp_path, case, waits_for=(0,) if case.endswith("stays") else (0, 1))
    assert time.monotonic() - began < TIMEOUT_S
    assert re.search(reason, second["error"])
    assert first["error"].startswith("another rank has ended. rank 1: a micro-batch did not fit")
    assert re.search(reason, first["error"])
    assert abs(first["ended"] - second["ended"]) < WITHIN_S
    assert "another rank has ended" in first["log"]
