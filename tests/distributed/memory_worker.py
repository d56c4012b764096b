"""One of two ranks, of which one runs out of memory; writes what it saw as JSON.

Called as ``python -m tests.distributed.memory_worker FOLDER CASE`` with RANK, WORLD_SIZE and so on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hf_pyao import OutOfDeviceMemoryError, attach
from tests.auto.retry.test_out_of_memory_cases import Bomb, plant
from tests.helpers import EVERYTHING, tiny_batch, tiny_model
from tests.helpers.ranks import write_result

NUM_STEPS = 3
NUM_MICRO_BATCHES = 2

CASES: dict[str, tuple[int, int, bool, int]] = {
    "nothing": (0, 0, False, 0),
    "forward without exchange": (2, 0, False, 1),
    "backward without exchange": (2, 0, True, 1),
    "backward without exchange, context inside": (2, 0, True, 1),
    "backward of the exchange, context inside": (2, 1, True, 1),
    "backward of the exchange": (2, 1, True, 1),
    "forward of the exchange": (2, 1, False, 1),
    # DistributedDataParallel sends buffers in the first forward after an exchange.
    "forward with buffers": (2, 0, False, 1),
    # DistributedDataParallel agrees on its buckets there, once.
    "backward without exchange, after the first": (1, 0, True, 1),
    "ever": (2, 0, True, 99),
}
"""By name, what fails on rank 1: step, micro-batch, whether in backward, and how often."""


class TimedBomb(Bomb):
    """Goes off while it is armed, as often as it is told to."""

    is_armed = False
    num_left = 0

    def check(self) -> None:
        if self.is_armed and self.num_left:
            self.num_left -= 1
            raise self.error()


def batch_of(step: int, index: int) -> dict[str, torch.Tensor]:
    return tiny_batch(100 * dist.get_rank() + 10 * step + index)


def train(case: str) -> dict[str, Any]:
    fails_step, fails_index, in_backward, times = CASES[case]
    bomb = TimedBomb()
    bomb.num_left = times if dist.get_rank() == 1 else 0
    model = plant(tiny_model("llama", dropout=0.1), bomb, layer=1, in_backward=in_backward)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in torch 2.13
        wrapped = DistributedDataParallel(model, broadcast_buffers=case.endswith("buffers"))
    torch.manual_seed(10 + dist.get_rank())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with attach(wrapped, EVERYTHING) as offloader:
        for step in range(NUM_STEPS):
            for index in range(NUM_MICRO_BATCHES):
                is_last = index == NUM_MICRO_BATCHES - 1
                no_sync = contextlib.nullcontext if is_last else wrapped.no_sync
                is_inside = case.endswith("inside")
                inside, outside = (
                    (no_sync, contextlib.nullcontext)
                    if is_inside
                    else (contextlib.nullcontext, no_sync)
                )

                def micro_batch(step: int = step, index: int = index, inside: Any = inside) -> None:
                    with inside():
                        wrapped(**batch_of(step, index), use_cache=False).loss.backward()

                bomb.is_armed = (step, index) == (fails_step, fails_index)
                with outside():
                    offloader.run_micro_batch(micro_batch)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        tightened = len(offloader.report_extra.get("out_of_memory", []))
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return {"tightened": tightened, "digest": digest.hexdigest(), "num_left": bomb.num_left}


def main(folder: Path, case: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    rank = dist.get_rank()
    facts: dict[str, Any] = {}
    try:
        facts = train(case)
    except OutOfDeviceMemoryError as error:
        facts = {"rank": rank, "error": str(error), "ended": time.time()}
    except BaseException as error:
        facts = {"rank": rank, "other": f"{type(error).__name__}: {error}", "ended": time.time()}
    write_result(folder, facts)
    os._exit(0)  # what is left of the group would wait for the peers


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
