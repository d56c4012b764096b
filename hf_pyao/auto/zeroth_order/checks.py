"""What zeroth order refuses of a model, before anything is changed."""

from __future__ import annotations

import torch
from torch import nn

from hf_pyao.engine.runtime.model_hooks import ModelHook
from hf_pyao.engine.weights.tables import StreamedTable
from hf_pyao.errors import ConflictError
from hf_pyao.ranks import process_rank
from hf_pyao.training_engines import (
    ENGINES,
    Sharded,
    engine_of_module,
    is_compiled,
    is_moved_by_accelerate,
)

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Of weights that can be perturbed."""


def check_model(model: nn.Module) -> None:
    """Refuse a model whose weights someone else moves, keeps or compiles, or that take no noise.

    Raises:
        ConflictError: with what was found, and what to do.
    """
    num_ranks = process_rank().num_ranks
    if num_ranks > 2:
        raise ConflictError(
            f"zeroth order runs on one process or on two, and the group has {num_ranks}. Start it "
            "with two, which run one pass each.",
            key="zeroth-order-ranks",
        )
    for path, module in model.named_modules():
        _check_module(path or type(model).__name__, module, num_ranks)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise _not_plain(name, "is on the meta device: it has no bytes yet")
        if parameter.requires_grad and parameter.dtype not in _DTYPES:
            raise _not_plain(name, f"is trained and has {parameter.dtype}: no noise is added to it")
        if engine := next((each for each in ENGINES if each.has(parameter)), None):
            raise _not_plain(name, f"is divided among ranks, by {engine.name}")


def _check_module(where: str, module: nn.Module, num_ranks: int) -> None:
    if any(isinstance(hook, ModelHook) for hook in module._forward_pre_hooks.values()):
        raise ConflictError(
            f"{where!r} is attached to an offloader of activations, with policy 'auto' or another, "
            "and zeroth order saves no activations. Call offloader.detach() first.",
            key="zeroth-order-attached",
        )
    if isinstance(module._parameters, StreamedTable):
        raise _not_plain(where, "has weights on the host, by an offloader or another ZerothOrder")
    unit_of = engine_of_module(module)
    if unit_of.shards is Sharded.WEIGHTS:
        raise _not_plain(where, f"is divided among ranks, by {unit_of.name}")
    if is_compiled(module):
        raise _not_plain(where, "is compiled: compiled code reads weights by itself")
    if is_moved_by_accelerate(module):
        raise _not_plain(where, "has a device map: Accelerate moves its weights by itself")
    kind = type(module).__name__
    if isinstance(module, nn.RNNBase) and any(p.requires_grad for p in module.parameters()):
        raise ConflictError(
            f"{where!r} ({kind}) keeps references to its weights, which would be read without the "
            "perturbation. Freeze it.",
            key="zeroth-order-reference",
        )
    counts = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    if counts and num_ranks > 1:
        raise ConflictError(
            f"{where!r} ({kind}) collects statistics in each pass, and the two processes run "
            "different passes: their models would differ. Run one process, or give "
            "track_running_stats=False.",
            key="zeroth-order-ranks",
        )


def _not_plain(where: str, what: str) -> ConflictError:
    return ConflictError(
        f"zeroth order: {where!r} {what}. Load the plain model, and give that.",
        key="zeroth-order-model",
    )
