"""Wraps a model in each of the ways that a scenario names, with or without hf_pyao."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from hf_pyao import PyAOConfig, PyAOPlugin, attach
from hf_pyao.auto.offloader import Offloader
from tests.distributed.models import build_model, layers_of
from tests.distributed.scenarios import LAYER_CLASSES, WORLD_SIZE, Scenario

LEARNING_RATE = 0.1


@dataclass(kw_only=True)
class Prepared:
    """A wrapped model and how to train it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    offloader: Offloader | None
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
    autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    accumulate: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """Entered around micro-batches whose gradients are not exchanged yet."""


def settings_of(scenario: Scenario) -> dict[str, Any]:
    """Return the configuration's fields: offload everything, however small."""
    return {
        "policy": "all",
        "min_bytes": 0,
        "keep_last_layers": scenario.keep_last_layers,
        "window": scenario.window,
        "host_memory_gib": 0.0625,
        "checkpoint_every": 2 if scenario.option == "checkpoint_every" else 0,
        "recompute_modules": ("attn_norm", "mlp_act") if scenario.option == "recompute" else (),
    }


def prepare(scenario: Scenario, *, offload: bool) -> Prepared:
    """Build, attach and wrap, in the order that *scenario* says; plain if not *offload*."""
    model = build_model(scenario.model, scenario.tuning, scenario.option)
    config = PyAOConfig(**settings_of(scenario)) if offload else None
    if scenario.wrapper.startswith("accelerate"):
        return _accelerate(model, scenario, config)
    if config is not None and scenario.attach == "before":
        offloader = attach(model, config)
    model = {"fsdp2": _fsdp2, "fsdp1": _fsdp1, "fsdp1_flat": _fsdp1}[scenario.wrapper](
        model, scenario
    )
    if config is not None and scenario.attach == "after":
        offloader = attach(model, config)
    prepared = Prepared(
        model=model,
        optimizer=_optimizer(model),
        offloader=None if config is None else offloader,
        accumulate=_fsdp2_accumulation(model) if scenario.wrapper == "fsdp2" else _no_sync(model),
    )
    if scenario.precision == "autocast":
        prepared.autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    return prepared


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters, unsharded, by name. All ranks must call it together."""
    context: AbstractContextManager[Any] = contextlib.nullcontext()
    if isinstance(model, FullyShardedDataParallel):
        context = FullyShardedDataParallel.summon_full_params(model, writeback=False)
    with context:
        return {
            name: _full(parameter.detach()).clone() for name, parameter in model.named_parameters()
        }


def local_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of this rank's part of all gradients, by name."""
    return {
        name: _local(parameter.grad).clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=LEARNING_RATE)


def _fsdp2(model: nn.Module, scenario: Scenario) -> nn.Module:
    shard = partial(
        fully_shard,
        mesh=init_device_mesh("cpu", (WORLD_SIZE,)),
        reshard_after_forward=scenario.option != "resident",
    )
    if scenario.precision == "policy":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard = partial(shard, mp_policy=policy)
    for layer in layers_of(model, scenario.model):
        shard(layer)
    shard(model)
    return model


def _fsdp1(model: nn.Module, scenario: Scenario) -> nn.Module:
    layer_classes = {type(layer) for layer in layers_of(model, scenario.model)}
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(layer_classes),
        mixed_precision=precision if scenario.precision == "policy" else None,
        device_id=torch.device("cpu"),
        use_orig_params=scenario.wrapper == "fsdp1",
    )


def _fsdp2_accumulation(model: Any) -> Callable[[], AbstractContextManager[Any]]:
    @contextlib.contextmanager
    def without_exchange() -> Any:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    return without_exchange


def _no_sync(model: Any) -> Callable[[], AbstractContextManager[Any]]:
    no_sync: Callable[[], AbstractContextManager[Any]] = model.no_sync
    return no_sync


def _accelerate(model: nn.Module, scenario: Scenario, config: PyAOConfig | None) -> Prepared:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    mixed = "no" if scenario.precision == "fp32" else "bf16"
    accelerator = Accelerator(cpu=True, mixed_precision=mixed)
    if scenario.wrapper == "accelerate_fsdp2":
        _switch_fsdp2_on(accelerator, scenario)
    offloader, plugin = None, None
    if config is not None and scenario.attach == "before":
        offloader = attach(model, config)
    elif config is not None:
        plugin = PyAOPlugin(**settings_of(scenario)).bind(accelerator)
    model, optimizer = accelerator.prepare(model, _optimizer(model))
    if plugin is not None:
        (offloader,) = plugin.offloaders
    return Prepared(
        model=model,
        optimizer=optimizer,
        offloader=offloader,
        backward=accelerator.backward,
        accumulate=partial(accelerator.no_sync, model),
    )


def _switch_fsdp2_on(accelerator: Any, scenario: Scenario) -> None:
    """Tell *accelerator* to use FSDP2; on a CPU it would drop the plugin without a word."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[LAYER_CLASSES[scenario.model]],
        activation_checkpointing=scenario.option == "checkpoint_wrapper",
    )
    if scenario.precision == "policy":
        plugin.set_mixed_precision("bf16")
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
