"""Sets a micro-batch on a Trainer, and tells DeepSpeed of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_pyao.training_engines import deepspeed_plugin


def take_batch(trainer: Any, micro_batch: int, accumulation: int) -> int:
    """Set these on *trainer*; return its batch size for each process."""
    args = trainer.args
    args.per_device_train_batch_size = micro_batch
    args.gradient_accumulation_steps = accumulation
    trainer._train_batch_size = args.train_batch_size
    plugin = deepspeed_plugin(trainer)
    if plugin is not None:
        _tell_deepspeed(args, plugin, micro_batch, accumulation)
    return int(args.train_batch_size)


def _tell_deepspeed(args: Any, plugin: Any, micro_batch: int, accumulation: int) -> None:
    """Write the choice into DeepSpeed's configurations, where "auto" was filled in already.

    The samples of an optimizer step stay, and with them ``train_batch_size``.
    """
    holders: list[Callable[[], Any]] = [
        lambda: plugin.deepspeed_config,
        lambda: plugin.hf_ds_config.config,
        lambda: args.hf_deepspeed_config.config,
    ]
    for holder in holders:
        try:
            found = holder()
        except AttributeError:
            continue
        if isinstance(found, dict):
            for key, value in (
                ("train_micro_batch_size_per_gpu", micro_batch),
                ("gradient_accumulation_steps", accumulation),
            ):
                if key in found:
                    found[key] = value
