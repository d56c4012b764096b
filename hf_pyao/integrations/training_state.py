"""What a Trainer will have on its device besides a step, and how it is told of its batch size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hf_pyao.integrations.micro_batch_checks import deepspeed_plugin

_OPTIMIZER_STATES: tuple[tuple[str, float], ...] = (
    ("8bit", 0.5),
    ("4bit", 0.25),
    ("adafactor", 0.0),
    ("sgd", 0.0),
    ("lion", 1.0),
    ("adagrad", 1.0),
    ("rmsprop", 1.0),
)
"""Part of an optimizer's name -> bytes of its states, as a share of the trained weights'; 2 for
others, such as AdamW."""


def bytes_besides(trainer: Any, model: nn.Module) -> int:
    """Return what training will have on the device besides weights, gradients and activations.

    The optimizer's states, which come with its first step, and the buckets in which data-parallel
    ranks reduce gradients.
    """
    trained_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    num_ranks = trainer.accelerator.num_processes
    plugin = deepspeed_plugin(trainer)
    name = str(getattr(trainer.args.optim, "value", trainer.args.optim)).lower()
    share = next((each for part, each in _OPTIMIZER_STATES if part in name), 2.0)
    state_bytes = share * trained_bytes
    if plugin is not None and int(plugin.zero_stage) >= 1:
        place = str(getattr(plugin, "offload_optimizer_device", "none")).lower()
        state_bytes = 0.0 if place != "none" else state_bytes / num_ranks
    if getattr(trainer.optimizer, "state", None):
        state_bytes = 0.0  # they are there already
    bucket_bytes = trained_bytes if num_ranks > 1 else 0
    return int(state_bytes) + bucket_bytes


def nbytes_of(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def take_batch(trainer: Any, micro_batch: int, accumulation: int) -> int:
    """Have *trainer* train with these; return its batch size for each process."""
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
