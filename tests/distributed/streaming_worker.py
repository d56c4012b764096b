"""One of two ranks that stream frozen weights under DDP: ``-m tests.distributed.streaming_worker``.

Arguments: the rank, and the folder for what was seen.
"""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_pyao import PyAOConfig, attach
from tests.helpers import tiny_batch
from tests.helpers.adapters import tiny_lora
from tests.helpers.ranks import join_group, write_result

CONFIG = PyAOConfig(policy="all", min_bytes=0, host_memory_gib=0.1, stream_weights=0)


def wrapped(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in torch 2.13
        return DistributedDataParallel(model)


def train(model: nn.Module, rank: int) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(3):
        loss: Any = model(**tiny_batch(10 * step + rank)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}


def main() -> None:
    folder = Path(sys.argv[1])
    rank = join_group(folder)
    origin = tiny_lora("llama")
    expected = train(wrapped(copy.deepcopy(origin)), rank)
    facts: dict[str, Any] = {}
    for when in ("before", "after"):
        model = copy.deepcopy(origin)
        if when == "before":
            attach(model, CONFIG)
            ddp = wrapped(model)
        else:
            ddp = wrapped(model)
            attach(ddp, CONFIG)
        found = train(ddp, rank)
        reducer: Any = ddp
        facts[when] = {
            "same": all(torch.equal(found[name], value) for name, value in expected.items()),
            "ignored": len(reducer.parameters_to_ignore),
        }
    write_result(folder, facts)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
