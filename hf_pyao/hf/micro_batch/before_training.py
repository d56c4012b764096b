"""Chooses a Trainer's micro-batch before training begins, at a constant global batch."""

from __future__ import annotations

from typing import Any

from hf_pyao.config import PyAOConfig
from hf_pyao.engine.rerun.generators import RandomState
from hf_pyao.errors import ConfigError
from hf_pyao.hf.micro_batch.checks import check_sharding
from hf_pyao.hf.micro_batch.chooser import ChosenBatch, MicroBatchChooser
from hf_pyao.text import describe_error


def choose_batch(trainer: Any, config: PyAOConfig) -> ChosenBatch:
    """Choose micro-batch and accumulation for *trainer*; all ranks choose the same.

    The model, its gradients, random numbers and the order of the data are as before.

    Args:
        trainer: about to train: model on its device, checkpointing switched on.
        config: what is offloaded.

    Raises:
        ConflictError: weights are sharded, or the optimizer steps in backward.
        ConfigError: nothing fits, or the data can only be iterated.
    """
    check_sharding(trainer)
    chosen: ChosenBatch | None = None
    error: Exception | None = None
    try:
        device = trainer.args.device
        with RandomState([device]).kept():
            chosen = MicroBatchChooser(trainer, config).choose()
    except Exception as caught:  # the other ranks wait to hear of it
        error = caught
    return _agreed(trainer, chosen, error)


def _agreed(trainer: Any, chosen: ChosenBatch | None, error: Exception | None) -> ChosenBatch:
    """Return the choice of the rank that chose the smallest.

    Raises:
        Exception: a rank could not choose; on all ranks.
    """
    if trainer.accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        own = (chosen, "" if error is None else describe_error(error))
        told: list[tuple[ChosenBatch | None, str]] = gather_object([own])
        failed = [(rank, text) for rank, (what, text) in enumerate(told) if what is None]
        if failed and error is None:
            rank, text = failed[0]
            error = ConfigError(
                f"rank {rank} could not choose a micro-batch: {text}", key="micro-batch-not-chosen"
            )
        choices = [what for what, _ in told if what is not None]
        if not failed:
            chosen = min(choices, key=lambda each: each.micro_batch)
    if error is not None:
        raise error
    assert chosen is not None
    return chosen
