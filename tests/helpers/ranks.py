"""The ranks of a distributed test: processes on one machine, over gloo on the CPU.

The test calls :func:`run_ranks`; each rank is ``python -m MODULE FOLDER ARGUMENTS...``, which calls
:func:`join_group` and :func:`write_result`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.measure import segment_memory
from hf_pyao.plan.step.ledger import MemoryLedger

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="not run: DeepSpeed is not installed (pip install 'hf_pyao[deepspeed]')",
)

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 300


@contextlib.contextmanager
def first_of_four_ranks() -> Iterator[None]:
    """Be the first of four ranks, of which there are no others: nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_ranks(
    module: str,
    folder: Path,
    *arguments: object,
    num_ranks: int = 2,
    codes: Sequence[int] | None = None,
    timeout_s: int = TIMEOUT_S,
) -> list[Any]:
    """Run the ranks; return what each wrote.

    Args:
        module: what each rank runs.
        folder: for results, logs and the rendezvous; also the first argument of the module.
        arguments: further arguments of the module.
        num_ranks: how many.
        codes: exit codes of these; 0 by default.
        timeout_s: how long each may take.
    """
    ranks = start_ranks(module, folder, *arguments, num_ranks=num_ranks)
    try:
        found = [ranks[rank].wait(timeout_s) for rank in range(num_ranks)]
    finally:
        end_ranks(ranks)
    expected = [0] * len(found) if codes is None else [*codes][: len(found)]
    assert found == expected, logs_of(folder)
    return read_results(folder, num_ranks)


class CountedDevice:
    """Says of the device's memory what ledgers count, one after the other. Nobody resets its peak."""

    def __init__(self) -> None:
        self._peak_bytes = 0

    @contextlib.contextmanager
    def counts(self, ledger: MemoryLedger) -> Iterator[None]:
        """Let *ledger* say it."""

        def allocated_and_peak_bytes(device: torch.device) -> tuple[int, int]:
            self._peak_bytes = max(self._peak_bytes, ledger.peak_bytes)
            return ledger.live_bytes, self._peak_bytes

        with mock.patch.object(
            segment_memory, "allocated_and_peak_bytes", allocated_and_peak_bytes
        ):
            yield


def slots_of(plan: Plan | None) -> list[dict[str, Any]] | None:
    """Return what *plan* does with each slot.

    Its reasons are left out: a rank that has corrected its times may word them anew.
    """
    if plan is None:
        return None
    return [{**slot, "reason": ""} for slot in plan.to_dict()["slots"]]


def read_results(folder: Path, num_ranks: int = 2) -> list[Any]:
    """Return what each rank wrote."""
    paths = [folder / f"rank{rank}.json" for rank in range(num_ranks)]
    assert all(path.exists() for path in paths), f"no results\n{logs_of(folder)}"
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def start_ranks(
    module: str, folder: Path, *arguments: object, num_ranks: int = 2
) -> list[subprocess.Popen[bytes]]:
    """Start the ranks; what they print goes to ``rank<number>.log`` in *folder*."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: v for name, v in os.environ.items() if not name.startswith("PYAO_")}
    environment |= {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": "",  # ranks on the CPU, also where there are accelerators
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]),
    }
    command = [sys.executable, "-m", module, str(folder), *map(str, arguments)]
    ranks = []
    for rank in range(num_ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"rank{rank}.log").open("wb") as log:
            ranks.append(
                subprocess.Popen(
                    command,
                    cwd=REPOSITORY,
                    env=environment | own,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return ranks


def end_ranks(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill those that still run."""
    for rank in ranks:
        rank.kill()
        rank.wait()


def logs_of(folder: Path) -> str:
    """Return the end of what each rank printed."""
    logs = sorted(folder.glob("rank*.log"))
    return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-4000:]}" for p in logs)


# ---- in a rank -----------------------------------------------------------------------------------


def join_group(folder: Path, *, timeout_s: int = TIMEOUT_S) -> int:
    """Join the process group, with one thread; return this process's rank."""
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    return rank


def write_result(folder: Path, result: object) -> None:
    """Write what this rank saw, for :func:`run_ranks`."""
    path = folder / f"rank{os.environ['RANK']}.json"
    path.write_text(json.dumps(result), encoding="utf-8")


@contextlib.contextmanager
def ends_at_once() -> Iterator[None]:
    """End the process behind the block: gloo's threads may abort an interpreter's own end."""
    status = 1
    try:
        yield
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
