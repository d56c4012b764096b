"""Ranks of a node that share one copy of a model: equal bits, bytes counted once, nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import tiny_model
from tests.helpers.ranks import end_ranks, logs_of, start_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform != "linux", reason="memory without a name"),
]

MIB = 2**20
Rank = subprocess.Popen[bytes]


def start(how: str, folder: Path, model: Path, num_ranks: int = 2) -> list[Rank]:
    module = "tests.distributed.shared_loading_worker"
    return start_ranks(module, folder, how, model, num_ranks=num_ranks)


def finished(workers: list[Rank], folder: Path) -> list[dict[str, Any]]:
    try:
        for worker in workers:
            assert worker.wait(240) in (0, -signal.SIGKILL), logs_of(folder)
    finally:
        end_ranks(workers)
    found = []
    for rank in range(len(workers)):
        path = folder / f"rank{rank}.json"
        found.append(json.loads(path.read_text()) if path.exists() else {})
    return found


def files_in_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def saved(folder: Path, **options: Any) -> Path:
    tiny_model("llama", **options).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("is_tied", [False, True])
def test_two_ranks_have_one_copy_and_the_bits_of_their_own(tmp_path: Path, is_tied: bool) -> None:
    before = files_in_memory()
    options = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12}
    model = saved(tmp_path / "model", tie_word_embeddings=is_tied, **options)
    stored = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert stored > 100 * MIB
    for facts in finished(start("train", tmp_path, model), tmp_path):
        assert "error" not in facts
        assert all(value is True for key, value in facts.items() if key.startswith("same")), facts
        assert facts["tied"] is is_tied
        assert facts["copied"] is True
        assert facts["uploads"] > 0
        assert 0.45 * stored < facts["shared_bytes"] < 0.62 * stored
    assert files_in_memory() <= before


def test_ranks_that_are_killed_leave_nothing(tmp_path: Path) -> None:
    before, free = files_in_memory(), shared_bytes()
    model = saved(tmp_path / "model", hidden_size=512, intermediate_size=1024)
    workers = start("wait", tmp_path, model)
    until = time.monotonic() + 120
    while len(list(tmp_path.glob("rank*.json"))) < 2 and time.monotonic() < until:
        time.sleep(0.1)
        assert all(worker.poll() is None for worker in workers)
    held = shared_bytes()
    end_ranks(workers)
    assert files_in_memory() <= before
    assert held - shared_bytes() > 20 * MIB, "the memory goes with the last process"
    assert shared_bytes() <= free + 8 * MIB


def shared_bytes() -> int:
    """Return the host's memory of files in memory, by the kernel."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise KeyError("Shmem")


def test_a_failure_of_one_rank_is_told_by_all(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    saved(tmp_path / "other", tie_word_embeddings=False, num_hidden_layers=2)
    leader, follower = finished(start("other models", tmp_path, model), tmp_path)
    assert "parameters of this model are not those" in follower["error"]
    assert "rank 1" in leader["error"]
    (tmp_path / "second").mkdir()
    for facts in finished(start("missing", tmp_path / "second", model), tmp_path / "second"):
        assert "missing" in facts["error"]
    (tmp_path / "third").mkdir()
    _, follower = finished(start("leader dies", tmp_path / "third", model), tmp_path / "third")
    assert "has ended" in follower["error"]
    (tmp_path / "fourth").mkdir()
    for facts in finished(start("no group", tmp_path / "fourth", model), tmp_path / "fourth"):
        assert "have no process group yet" in facts["error"]


def test_three_ranks(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", hidden_size=256)
    for facts in finished(start("train", tmp_path, model, 3), tmp_path):
        assert all(value is True for key, value in facts.items() if key.startswith("same")), facts
