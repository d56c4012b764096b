"""What a Trainer has on its device besides a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_pyao.plan.hardware.beside_step import (
    ZERO_BUCKET_ELEMENTS,
    Beside,
    blas_workspaces,
    ddp_buckets,
    zero_bucket,
)
from hf_pyao.plan.hardware.kernel_settings import settings_of
from hf_pyao.training_engines import ZERO_1_2, Sharded, deepspeed_plugin, engine_of_trainer

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


def memory_beside(trainer: Any, model: nn.Module) -> list[Beside]:
    """Return what training will have on the device besides weights, gradients and activations.

    The optimizer's states, which come with its first step, and what data-parallel ranks reduce
    gradients in, DDP's buckets or ZeRO's. What comes with any step is not among them
    (:func:`library_bytes`).
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    trained_bytes = sum(p.nbytes for p in trained)
    plugin = deepspeed_plugin(trainer)
    found = [
        Beside("states of the optimizer", _state_bytes(trainer, plugin, trained_bytes)),
        _buckets(trainer, plugin, trained_bytes),
    ]
    return [each for each in found if each.nbytes]


def library_bytes(device: torch.device) -> int:
    """Return what libraries allocate on *device* in the first step, and keep: cuBLAS."""
    return blas_workspaces(settings_of(device)).nbytes if device.type == "cuda" else 0


def _state_bytes(trainer: Any, plugin: Any, trained_bytes: int) -> int:
    if getattr(trainer.optimizer, "state", None):
        return 0  # they are there already
    share = states_share(str(getattr(trainer.args.optim, "value", trainer.args.optim)))
    if plugin is not None and engine_of_trainer(trainer).shards >= Sharded.OPTIMIZER:
        place = str(getattr(plugin, "offload_optimizer_device", "none")).lower()
        share = 0.0 if place != "none" else share / trainer.accelerator.num_processes
    return int(share * trained_bytes)


def states_share(name: str) -> float:
    """Return the bytes of an optimizer's states as a share of the trained weights', by its name."""
    return next((each for part, each in _OPTIMIZER_STATES if part in name.lower()), 2.0)


def _buckets(trainer: Any, plugin: Any, trained_bytes: int) -> Beside:
    engine = engine_of_trainer(trainer)
    if engine is ZERO_1_2:
        zero = dict(plugin.deepspeed_config.get("zero_optimization", {}))
        size = zero.get("reduce_bucket_size")
        elements = int(size) if isinstance(size, int | float) else ZERO_BUCKET_ELEMENTS
        return zero_bucket(num_elements=elements, overlaps=bool(zero.get("overlap_comm")))
    if trainer.accelerator.num_processes < 2:
        return Beside("", 0)
    handler = getattr(trainer.accelerator, "ddp_handler", None)
    is_view = (
        bool(getattr(handler, "gradient_as_bucket_view", False))
        and engine.shards == Sharded.NOTHING
    )
    return ddp_buckets(trained_bytes, is_view=is_view)


def nbytes_of(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
