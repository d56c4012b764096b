"""Refuses what a choice of micro-batch cannot be combined with, and names the remedy."""

from __future__ import annotations

from typing import Any

from hf_pyao.config import PyAOConfig
from hf_pyao.errors import ConfigError, ConflictError
from hf_pyao.training_engines import (
    Feature,
    TrainingEngine,
    engine_of_arguments,
    engine_of_trainer,
)

SETTING = "auto_micro_batch (--activation_offload_auto_micro_batch)"

PREDICTED_POLICIES = ("auto", "all", "budget", "off")
"""Policies of which it is known before training what they offload."""


def check_auto_micro_batch(args: object, config: PyAOConfig) -> None:
    """Refuse what a choice of micro-batch cannot go together with. Touches no device.

    Raises:
        ConflictError: transformers' ``auto_find_batch_size``, ``split_batches``, or an engine that
            shards weights.
        ConfigError: a policy of which is not known before training what it offloads.
    """
    if config.auto_micro_batch == "off":
        return
    if getattr(args, "auto_find_batch_size", False):
        raise ConflictError(
            f"{SETTING} is on together with transformers' auto_find_batch_size, which changes the "
            "micro-batch too, and the global batch with it. Drop --auto_find_batch_size.",
            key="micro-batch-conflict",
        )
    if getattr(getattr(args, "accelerator_config", None), "split_batches", False):
        raise ConflictError(
            f"{SETTING} is on together with split_batches of accelerator_config, with which "
            "per_device_train_batch_size is shared out among the processes. Drop split_batches.",
            key="micro-batch-conflict",
        )
    _refuse_sharding(engine_of_arguments(args))
    from transformers import Trainer

    if not hasattr(Trainer, "_inner_training_loop"):  # a method of its own, from 4.57 on
        raise ConflictError(
            f"{SETTING} needs Trainer._inner_training_loop, which this transformers does not have. "
            "Choose with `pyao estimate --find`.",
            key="micro-batch-trainer",
        )
    if config.policy not in PREDICTED_POLICIES:
        name = config.policy if isinstance(config.policy, str) else config.policy.name
        raise ConfigError(
            f"{SETTING} predicts what policies {', '.join(map(repr, PREDICTED_POLICIES))} offload, "
            f"and {config.label('policy')} is {name!r}. Take one of them, or choose with "
            "`pyao estimate --find`.",
            key="micro-batch-conflict",
        )


def refuse_without_trainer(config: PyAOConfig, who: str) -> None:
    """Refuse a choice of micro-batch where no Trainer of ours can make it.

    Raises:
        ConfigError: it is asked for.
    """
    if config.auto_micro_batch != "off":
        raise ConfigError(
            f"{config.label('auto_micro_batch')} is {config.auto_micro_batch!r}, and {who} cannot "
            "change the batch size. Train with PyAOTrainer (PyAOTrainerMixin), or choose with "
            "`pyao estimate --find` and set the batch size yourself.",
            key="micro-batch-trainer",
        )


def check_sharding(trainer: Any) -> None:
    """Refuse engines that have no whole model before training, which arguments do not tell of.

    Raises:
        ConflictError: weights are sharded.
    """
    _refuse_sharding(engine_of_trainer(trainer))


def _refuse_sharding(engine: TrainingEngine) -> None:
    reason = engine.refusal(Feature.MICRO_BATCH)
    if reason:
        raise ConflictError(
            f"{SETTING} records and tries steps of the whole model on one device, and {reason}. "
            "Drop it; `pyao estimate --find` predicts for one device.",
            key="micro-batch-conflict",
        )
