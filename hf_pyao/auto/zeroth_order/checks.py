"""What zeroth order refuses of a model, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator

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
        kind = type(module).__name__
        for found, key in _conflicts(module, num_ranks):
            raise ConflictError(f"zeroth order: {path or 'the model'!r} ({kind}) {found}.", key=key)
    for name, parameter in model.named_parameters():
        found = ""
        if parameter.is_meta:
            found = "is on the meta device: it has no bytes yet"
        elif parameter.requires_grad and parameter.dtype not in _DTYPES:
            found = f"is trained and has {parameter.dtype}: no noise is added to it"
        elif engine := next((each for each in ENGINES if each.has(parameter)), None):
            found = f"is divided among ranks, by {engine.name}"
        if found:
            raise ConflictError(
                f"zeroth order: {name!r} {found}. Load the plain model, and give that.",
                key="zeroth-order-model",
            )


def _conflicts(module: nn.Module, num_ranks: int) -> Iterator[tuple[str, str]]:
    """Yield what speaks against *module*, with what to do; and the key of that."""
    plain = ". Load the plain model, and give that"
    if any(isinstance(hook, ModelHook) for hook in module._forward_pre_hooks.values()):
        found = "is attached to an offloader of activations, with policy 'auto' or another, and "
        found += "zeroth order saves no activations. Call offloader.detach() first"
        yield found, "zeroth-order-attached"
    if isinstance(module._parameters, StreamedTable):
        found = "has weights on the host already, by an offloader or by another ZerothOrder"
        yield f"{found}. Detach or close that first", "zeroth-order-model"
    unit_of = engine_of_module(module)
    if unit_of.shards is Sharded.WEIGHTS:
        yield f"is divided among ranks, by {unit_of.name}{plain}", "zeroth-order-model"
    if is_compiled(module):
        yield f"is compiled: compiled code reads weights by itself{plain}", "zeroth-order-model"
    if is_moved_by_accelerate(module):
        found = "has a device map: Accelerate moves its weights by itself"
        yield found + plain, "zeroth-order-model"
    if isinstance(module, nn.RNNBase) and any(p.requires_grad for p in module.parameters()):
        found = "keeps references to its weights, which would be read without the perturbation"
        yield f"{found}. Freeze it", "zeroth-order-reference"
    counts = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    if counts and num_ranks > 1:
        found = "collects statistics in each pass, and the two processes run different passes: "
        found += "their models would differ. Run one process, or give track_running_stats=False"
        yield found, "zeroth-order-ranks"
