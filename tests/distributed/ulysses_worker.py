"""One of two ranks among which DeepSpeed's Ulysses divides each sequence, with ``long_context``.

Called as ``python -m tests.distributed.ulysses_worker FOLDER STAGE``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_pyao import PyAOConfig, attach
from hf_pyao.training_engines import ZERO_3
from tests.distributed.models import BATCH, SEQUENCE, batch_of, build_model
from tests.helpers.ranks import ends_at_once, join_group, write_result

NUM_STEPS = 3
LONG = 8
"""How often a batch's length is taken."""


def local_batch(step: int) -> dict[str, Any]:
    """Return this rank's half of each sequence, which all ranks have in common."""
    ids = batch_of(0, step)["input_ids"].repeat(1, LONG)
    labels = nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    positions = torch.arange(ids.shape[1]).expand(BATCH, -1)
    half = slice(dist.get_rank() * ids.shape[1] // 2, (dist.get_rank() + 1) * ids.shape[1] // 2)
    return {
        "input_ids": ids[:, half],
        "position_ids": positions[:, half],
        "labels": labels[:, half].contiguous(),
        "shift_labels": labels[:, half].contiguous(),
        "use_cache": False,
    }


def train(stage: int, groups: Any, config: PyAOConfig | None) -> dict[str, Any]:
    """Train some steps; return losses, parameters, and what was done."""
    linear = nn.functional.linear
    model: Any = build_model("llama", "full", "")
    engine = deepspeed.initialize(
        model=model,
        mpu=groups,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "sequence_parallel_size": 2,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )[0]
    assert engine.zero_optimization_stage() == stage
    assert engine.seq_parallel_group is not None
    offloader = None if config is None else attach(model, config)
    losses = []
    for step in range(NUM_STEPS):
        loss = engine(**local_batch(step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found: dict[str, Any] = {"losses": losses, "moved": 0}
    if offloader is not None:
        found["moved"] = offloader.metrics()["offloaded_bytes"]
        offloader.detach()
    with deepspeed.zero.GatheredParameters([p for p in model.parameters() if ZERO_3.has(p)]):
        found["bits"] = [each.detach().flatten().tolist() for each in model.parameters()]
    nn.functional.linear = linear
    return found


def main(folder: Path, stage: int) -> None:
    """Train without hf_pyao, with its losses and tiles alone, and with all of ``long_context``."""
    join_group(folder)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled
    deepspeed.init_distributed("gloo", dist_init_required=False)
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    groups = UlyssesSPAttentionHF.register_with_transformers(
        build_model("llama", "full", ""), "sdpa", sequence_parallel_size=2, micro_batch_size=BATCH
    )
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not attention, "Ulysses is on"
    levers: dict[str, Any] = {"head_loss": "chunked", "mlp_tiles": 2}
    own = {"policy": "all", "min_bytes": 0, "host_memory_gib": 0.1, "keep_last_layers": 0}
    found = {
        "plain": train(stage, groups, None),
        "offloaded": train(stage, groups, PyAOConfig(**own)),
        "levers": train(stage, groups, PyAOConfig(policy="off", **levers)),
        "long context": train(stage, groups, PyAOConfig(**own, **levers, long_context=True)),
        "length": BATCH * SEQUENCE * LONG,
    }
    write_result(folder, found)
    dist.barrier()


if __name__ == "__main__":
    with ends_at_once():
        main(Path(sys.argv[1]), int(sys.argv[2]))
