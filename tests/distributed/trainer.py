"""Scenarios that train through transformers' Trainer, on both ranks."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_pyao import PyAOConfig, PyAOTrainer
from tests.distributed.audit import RecogniserAudit
from tests.distributed.models import BATCH, batch_of, build_model, layers_of
from tests.distributed.scenarios import Scenario
from tests.distributed.wrapping import full_parameters, settings_of

NUM_STEPS = 3


class _Observer(TrainerCallback):
    """Teaches an audit the parameters of each step, and notes how the model is wrapped."""

    def __init__(self, scenario: Scenario, audit: RecogniserAudit | None) -> None:
        self.scenario = scenario
        self.audit = audit
        self.trainer: Any = None
        self.facts: dict[str, Any] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = self.trainer.model_wrapped
        self.facts = {
            "model_class": type(model).__name__,
            "layer_classes": sorted(
                {type(layer).__name__ for layer in layers_of(model, self.scenario.model)}
            ),
            "world_size": self.trainer.accelerator.num_processes,
        }
        if self.audit is not None:
            self.audit.learn(full_parameters(model))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        offloader = getattr(self.trainer, "offloader", None)
        if offloader is not None:
            self.facts["busy_host_bytes"] = offloader.host_pool.settle()


def train(
    scenario: Scenario, audit: RecogniserAudit | None
) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]], dict[str, Any]]:
    """Train a few steps; return logged losses, final parameters and facts."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    num_accumulated = 2 if scenario.option == "accumulate" else 1
    observer = _Observer(scenario, audit)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            bf16=scenario.precision == "autocast",
            max_steps=NUM_STEPS,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=num_accumulated,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        common: dict[str, Any] = {
            "model": build_model(scenario.model, scenario.tuning, scenario.option),
            "args": args,
            "train_dataset": _examples(),
            "callbacks": [observer],
        }
        if audit is None:
            trainer = Trainer(**common)
        else:
            config = PyAOConfig(**settings_of(scenario), log_metrics="all")
            trainer = PyAOTrainer(**common, pyao_config=config)
        observer.trainer = trainer
        trainer.train()
    assert isinstance(trainer.model, nn.Module)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    if audit is not None:
        observer.facts["metrics"] = {
            key.removeprefix("pyao/"): value for key, value in logs[-1].items() if "pyao/" in key
        }
    losses = [torch.tensor(entry["loss"]) for entry in logs]
    return losses, [full_parameters(trainer.model)], observer.facts


def _examples() -> list[dict[str, torch.Tensor]]:
    batches = [batch_of(rank=9, index=index) for index in range(6)]
    return [
        {key: value[row] for key, value in batch.items()}
        for batch in batches
        for row in range(BATCH)
    ]
