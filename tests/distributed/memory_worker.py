"""One of two ranks, of which one runs out of memory; writes what it saw as JSON.

Called as ``python -m tests.distributed.memory_worker FOLDER CASE`` with RANK, WORLD_SIZE and so on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hf_pyao import OutOfDeviceMemoryError, attach
from tests.helpers import EVERYTHING, tiny_batch, tiny_model
from tests.integrations.memory_faults import EVER, MemoryFaults

NUM_STEPS = 2
NUM_MICRO_BATCHES = 2

CASES = {
    # What fails, on rank 1: step, micro-batch, at which allocation (a share of all).
    "nothing": None,
    "forward without exchange": (1, 0, 0.2),
    "backward without exchange": (1, 0, 0.8),
    "forward of the exchange": (1, 1, 0.2),
    "backward of the exchange": (1, 1, 0.98),
    "ever": (1, 0, EVER),
    "ever, and stays": (1, 0, EVER),
}
"""By name, what fails on rank 1: which step, which micro-batch, and where in it."""


def allocations_of(model: torch.nn.Module) -> dict[int, int]:
    """Return which operations of a micro-batch allocate."""
    faults = MemoryFaults()
    with faults:
        model(**batch_of(0, 0), use_cache=False).loss.backward()
    model.zero_grad()
    return faults.allocations


def batch_of(step: int, index: int) -> dict[str, torch.Tensor]:
    return tiny_batch(100 * dist.get_rank() + 10 * step + index)


def faults_of(case: str, allocations: dict[int, int]) -> dict[tuple[int, int], MemoryFaults]:
    """Return what fails on this rank, by step and micro-batch."""
    fails = CASES[case]
    if fails is None or dist.get_rank() == 0:
        return {}
    step, index, share = fails
    if share is EVER:
        return {(step, index): MemoryFaults(EVER)}
    at = {int(len(allocations) * share)}
    return {(step, index): MemoryFaults(at, allocations)}


def train(case: str, *, broadcasts: bool) -> dict[str, Any]:
    model = tiny_model("gpt2", dropout=0.1)
    with attach(model, EVERYTHING) as offloader:
        faults = faults_of(case, allocations_of(model))
    wrapped = DistributedDataParallel(
        model, broadcast_buffers=broadcasts, gradient_as_bucket_view=True
    )
    torch.manual_seed(10 + dist.get_rank())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    facts: dict[str, Any] = {"rank": dist.get_rank()}
    with attach(wrapped, EVERYTHING) as offloader:
        for step in range(NUM_STEPS):
            for index in range(NUM_MICRO_BATCHES):
                fault = faults.get((step, index), contextlib.nullcontext())

                def micro_batch(step: int = step, index: int = index, fault: Any = fault) -> None:
                    with fault:
                        wrapped(**batch_of(step, index), use_cache=False).loss.backward()

                is_last = index == NUM_MICRO_BATCHES - 1
                with contextlib.nullcontext() if is_last else wrapped.no_sync():
                    facts["began"] = time.time()
                    offloader.run_micro_batch(micro_batch)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        facts["tightened"] = len(offloader.report_extra.get("out_of_memory", []))
    facts["raised"] = sum(getattr(fault, "num_raised", 0) for fault in faults.values())
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    facts["digest"] = digest.hexdigest()
    return facts


def main(folder: Path, case: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    rank = dist.get_rank()
    facts: dict[str, Any] = {}
    try:
        facts = train(case.removesuffix(" with buffers"), broadcasts=case.endswith("buffers"))
    except OutOfDeviceMemoryError as error:
        facts = {"rank": rank, "error": str(error), "ended": time.time()}
    except BaseException as error:
        facts = {"rank": rank, "other": f"{type(error).__name__}: {error}", "ended": time.time()}
    (folder / f"rank{rank}.json").write_text(json.dumps(facts), encoding="utf-8")
    if case == "ever, and stays" and rank == 1:
        time.sleep(90)  # as a script does that catches everything
    os._exit(0)  # what is left of the group would wait for the peers


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
