"""Streamed weights under DDP: the same parameters, whether attached before or after wrapping."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.conftest import REPOSITORY

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]


def test_parameters_are_the_same_on_two_ranks(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.streaming_worker", str(rank), tmp_path],
            cwd=REPOSITORY,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=240)
            assert worker.returncode == 0, errors
    finally:
        for worker in workers:
            worker.kill()
    for rank in range(2):
        facts = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert facts["before"]["same"]
        assert facts["after"]["same"]
        assert facts["before"]["ignored"] > 0
