"""One of two ranks on which Trainer divides each sequence, by Accelerate's ``sp_size``.

Called as ``python -m tests.distributed.ulysses_trainer_worker FOLDER STAGE``.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_pyao import PyAOConfig, PyAOTrainer
from hf_pyao.attachment import offloader_of
from hf_pyao.training_engines import ZERO_3
from tests.distributed.models import BATCH, batch_of, build_model
from tests.distributed.zero_cases import Case
from tests.distributed.zero_worker import deepspeed_settings
from tests.helpers.ranks import ends_at_once, join_group, slots_of, write_result

NUM_STEPS = 8
LONG = 32
"""How often a batch's length is taken."""


def examples() -> list[dict[str, torch.Tensor]]:
    found = []
    for index in range(12):
        for ids in batch_of(9, index)["input_ids"].repeat(1, LONG):
            positions = torch.arange(len(ids))
            found.append({"input_ids": ids, "labels": ids, "position_ids": positions})
    return found


class _Noted(TrainerCallback):
    """Notes what the plan is, after each step."""

    plan: Any = None
    said = ""

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        offloader = offloader_of(kwargs["model"])
        assert offloader is not None
        self.plan, self.said = slots_of(offloader.plan), offloader.describe()


def train(folder: Path, stage: int, config: PyAOConfig | None) -> dict[str, Any]:
    """Train some steps; return losses, parameters, and what was done."""
    linear, attention = nn.functional.linear, ALL_ATTENTION_FUNCTIONS["sdpa"]
    sequences = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        deepspeed=deepspeed_settings(Case(stage)),
        parallelism_config=ParallelismConfig(
            sp_size=2, sp_backend="deepspeed", sp_handler=sequences
        ),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    cls: Any = Trainer
    if config is not None:
        cls = functools.partial(PyAOTrainer, pyao_config=config)
    model: Any = build_model("llama", "full", "")
    noted = _Noted()
    trainer = cls(model=model, args=args, train_dataset=examples())
    if config is not None:
        trainer.add_callback(noted)
    trainer.train()
    engine: Any = trainer.model_wrapped
    assert engine.zero_optimization_stage() == stage
    assert engine.seq_parallel_group is not None
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not attention, "Ulysses is on"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found: dict[str, Any] = {"losses": losses, "moved": 0}
    if config is not None:
        found["moved"] = trainer.offload_metrics["offloaded_bytes"]
        found |= {"plan": noted.plan, "said": noted.said}
    with deepspeed.zero.GatheredParameters([p for p in model.parameters() if ZERO_3.has(p)]):
        found["bits"] = [each.detach().flatten().tolist() for each in model.parameters()]
    nn.functional.linear = linear
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    for name in ("_SEQUENCE_PARALLEL_GROUP", "_SEQUENCE_DATA_PARALLEL_GROUP"):
        setattr(parallel_state_sp, name, None)  # or there would be one run a process
    return found


def main(folder: Path, stage: int) -> None:
    """Train without hf_pyao, with its losses and tiles alone, and with all of ``long_context``."""
    join_group(folder)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled
    # On a CPU Accelerate leaves that to DeepSpeed's engine, which is made behind Ulysses.
    deepspeed.init_distributed("gloo", dist_init_required=False)
    levers: dict[str, Any] = {"head_loss": "chunked", "mlp_tiles": 2}
    own = {"policy": "all", "min_bytes": 0, "host_memory_gib": 0.1, "keep_last_layers": 0}
    found: dict[str, Any] = {}
    configs = {
        "plain": None,
        "offloaded": PyAOConfig(**own),
        "levers": PyAOConfig(policy="off", **levers),
        "long context": PyAOConfig(**own, **levers, long_context=True),
        "auto": PyAOConfig(
            policy="auto",
            min_bytes=0,
            host_memory_gib=0.1,
            device_memory_gib=1.4e-3,
            profile_steps=1,
            **levers,
        ),
    }
    for name, each in configs.items():
        found[name] = train(folder, stage, each)
    write_result(folder, found)


if __name__ == "__main__":
    with ends_at_once():
        main(Path(sys.argv[1]), int(sys.argv[2]))
