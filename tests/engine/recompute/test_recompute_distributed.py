"""Recomputing under DDP and FSDP2, on two ranks: same bits as without hf_pyao."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORLD_SIZE = 2
TIMEOUT_S = 240
REPOSITORY = Path(__file__).parents[3]

pytestmark = pytest.mark.distributed


@pytest.mark.thorough
def test_two_ranks_compute_the_same_bits(tmp_path: Path) -> None:
    processes = []
    for rank in range(WORLD_SIZE):
        environment = {name: v for name, v in os.environ.items() if not name.startswith("PYAO_")}
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(WORLD_SIZE),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]),
        }
        command = [sys.executable, "-m", "tests.engine.recompute.recompute_worker", str(tmp_path)]
        with (tmp_path / f"rank{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        codes = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = "\n".join(path.read_text(errors="replace")[-4000:] for path in tmp_path.glob("*.log"))
    assert codes == [0, 0], logs
    for rank in range(WORLD_SIZE):
        results = json.loads((tmp_path / f"rank{rank}.json").read_text(encoding="utf-8"))
        assert len(results) == 3 * (3 * 2 + 7)  # wrappers, models alone and beside offloading, sets
        for name, facts in results.items():
            assert facts["different"] == [], f"rank {rank}, {name}"
            assert facts["num_tensors"] > 20
            assert facts["recomputed_bytes"] > 0, f"rank {rank}, {name}"
