"""Policy auto on two and four ranks that DeepSpeed's ZeRO trains: plans, bits, bytes, gathers.

Each rank asserts that its engine is ZeRO in the stage of the case; see ``zero_worker.py``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.models import BATCH, SEQUENCE, VOCAB
from tests.distributed.zero_cases import CASES, HOLDS, TIMED
from tests.recipes.conftest import REPOSITORY

pytestmark = [
    pytest.mark.thorough,  # each starts processes that import DeepSpeed
    pytest.mark.distributed,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="not run: DeepSpeed is not installed (pip install 'hf_pyao[deepspeed]')",
    ),
]

MOST_OVER = 1.1
"""By what factor the peak of a plan that was measured may be above the counted one."""

UNSEEN = 0.01
"""A peak below those of earlier steps is not seen: an earlier step's difference stands for it, which
of four ranks is that close."""

LOGITS_BYTES = 4 * BATCH * SEQUENCE * VOCAB
"""Trainer lets go of the outputs before backward. The recorded step holds them, as loops do."""

SCALARS_BYTES = 64
"""Losses, and generators' states, that live on beside a step."""

FOLLOWS = ("CHECKING", "FOLLOWING")


FOUR = ("zero 3", "zero 3, offloaded", "zero 3, bfloat16", "zero 2", "zero 2, all levers", "zero 1")
"""Cases that four ranks train too."""


def run(cases: Iterable[str], folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    """Run *cases* on so many ranks; return what each saw."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: v for name, v in os.environ.items() if not name.startswith("PYAO_")}
    environment |= {
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, "-m", "tests.distributed.zero_worker", str(folder), *cases]
    logs = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
    workers = []
    try:
        for rank, log in enumerate(logs):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("wb") as out:
                workers.append(
                    subprocess.Popen(
                        command, cwd=REPOSITORY, env=own, stdout=out, stderr=subprocess.STDOUT
                    )
                )
        for worker, log in zip(workers, logs, strict=True):
            assert worker.wait(1800) == 0, log.read_text(errors="replace")[-4000:]
    finally:
        for worker in workers:
            worker.kill()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def check(case: str, ranks: list[dict[str, Any]], unseen: float = 0.0) -> None:
    """Check what the *ranks* saw of a case."""
    for rank in ranks:
        assert "error" not in rank, rank["error"]
        assert rank["different"] == []
        assert rank["num"] > 20, "all parameters"
        plain, planned = rank["plain"], rank["planned"]
        assert plain["losses"] == planned["losses"]
        assert planned["parameters_moved"] == planned["misses"] == []
        assert planned["plan"], planned["summary"]
        assert planned["counted"] < plain["counted"]
    first, *others = (rank["planned"] for rank in ranks)
    counted = max(each["counted"] for each in (first, *others))
    measured = first["predicted"] + first["unpredicted"]
    # Trainer runs a micro-batch in `run_micro_batch`, which keeps some elements of each weight to see
    # whether it has changed.
    assert (1 - unseen) * counted <= measured + first["sampled_bytes"] + SCALARS_BYTES
    assert measured <= MOST_OVER * counted + LOGITS_BYTES
    begins = next(at for at, mode in first["changes"] if mode in FOLLOWS)
    for other in others:
        assert begins == next(at for at, mode in other["changes"] if mode in FOLLOWS)
        for what in ("plan", "levers", "window"):
            assert first[what] == other[what]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what two ranks saw, of all cases: to import DeepSpeed takes longer than most of them."""
    return run([*CASES, *TIMED], tmp_path_factory.mktemp("zero"), 2)


@pytest.mark.parametrize("case", CASES)
def test_zero_keeps_its_bits_and_takes_no_more_than_predicted(
    case: str, ranks: list[dict[str, Any]]
) -> None:
    check(case, [rank[case] for rank in ranks])


def test_four_ranks_take_no_more_than_predicted(tmp_path: Path) -> None:
    ranks = run(FOUR, tmp_path, 4)
    for case in FOUR:
        check(case, [rank[case] for rank in ranks], UNSEEN)


@pytest.mark.parametrize("name", TIMED)
def test_collectives_are_timed_and_no_gathered_weight_is_held(
    name: str, ranks: list[dict[str, Any]]
) -> None:
    first, second = (rank[name] for rank in ranks)
    assert "error" not in first, first["error"]
    timed = first["timed"]
    assert timed["is_off"]
    assert timed["speed"] > 0
    if name in HOLDS:
        for rank in (first["held"], second["held"]):
            assert rank["off"] >= rank["num_tokens"] - BATCH > rank["chunked"] * 2 > 0
            let_go = dict(rank["left"])
            assert len(let_go) > 20, "each parameter"
            assert all(let_go.values()), "no gathered weight is held for backward"
    if name == "nothing ahead":
        assert min(timed["waits_ms"]) > 0, "in layers, forward and backward, and in the head"
