"""A rank that trains with policy auto: ``python -m tests.distributed.auto_worker``."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_pyao import PyAOConfig, attach
from hf_pyao.config import GIB
from hf_pyao.plan.options.chosen_levers import ChosenLevers
from hf_pyao.plan.options.lever_choice import LeverChoice
from tests.distributed.models import batch_of, build_model, layers_of
from tests.helpers.ranks import join_group, slots_of, write_result

NUM_MEASURED = 2
NUM_STEPS = 7
CAP_BYTES = 1  # below anything: the plan with the least peak is taken


def train(wrapper: str, model: nn.Module, config: PyAOConfig | None) -> dict[str, Any]:
    """Train a few steps; return gradients' sums and bits, and what was decided."""
    offloader = None if config is None else attach(model, config)
    if wrapper == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model)
    else:
        units: dict[str, Any] = {}
        if wrapper == "hsdp":
            units["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        resharded = {"reshard_after_forward": 2} if wrapper == "fewer ranks" else {}
        for layer in layers_of(model, "llama"):
            fully_shard(layer, **units, **resharded)
        wrapped = fully_shard(model, **units)
    bits = []
    for step in range(NUM_STEPS):
        torch.manual_seed(step)
        wrapped.zero_grad()
        loss = wrapped(**batch_of(dist.get_rank(), 0)).loss
        loss.backward()
        gradients = [p.grad for p in wrapped.parameters() if p.grad is not None]
        local = [getattr(g, "_local_tensor", g) for g in gradients]
        bits.append([loss.item(), *(g.double().sum().item() for g in local)])
    found: dict[str, Any] = {"bits": bits}
    if offloader is not None:
        found["summary"] = offloader.auto.summary if offloader.auto else ""
        found["plan"] = slots_of(offloader.plan)
        found["levers"] = None if offloader.plan is None else offloader.plan.levers
        found["runs_again"] = getattr(offloader._lifecycle, "length", 0)
        found["moved"] = offloader.metrics().get("offloaded_bytes", 0.0)
        offloader.detach()
    return found


def run_again_each_layer() -> None:
    """Have the choice among levers fall on layers that run again, whatever it costs."""
    best = LeverChoice.best

    def chosen(choice: LeverChoice, limit_bytes: float) -> ChosenLevers:
        levers = dataclasses.replace(choice.levers, checkpoint_every=1)
        planner = choice.planner_for(levers)
        found = best(choice, limit_bytes)
        return dataclasses.replace(found, levers=levers, planner=planner, candidate=planner.least())

    LeverChoice.best = chosen  # type: ignore[method-assign]


def main(folder: Path, wrapper: str) -> None:
    """Train with and without, and write what came of it."""
    join_group(folder)
    config = PyAOConfig(
        policy="auto",
        profile_steps=NUM_MEASURED,
        min_bytes=0,
        device_memory_gib=CAP_BYTES / GIB,
        host_memory_gib=0.25,
    )
    if wrapper == "ddp":
        run_again_each_layer()
    plain = train(wrapper, build_model("llama", "full", ""), None)
    planned = train(wrapper, build_model("llama", "full", ""), config)
    write_result(folder, {"plain": plain, "planned": planned})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
