"""Recognises parameters that ZeRO-3, FSDP and their like have sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hf_pyao.engine.runtime.sharding import Sharding
from hf_pyao.training_engines import FSDP2, ZERO_3, Feature, engine_of_module


class KnownSharding(Sharding):
    """Sharding by DeepSpeed ZeRO-3 and FSDP; FSDP2's needs no case of its own."""

    def reason_not_traceable(self, module: nn.Module) -> str | None:
        """Refuse ZeRO-3: the data of a parameter is another by the time of replay."""
        return ZERO_3.reason(Feature.RECOMPUTATION) if is_sharded_by_zero(module) else None

    def reason_to_run_alone(self, stack: nn.Module) -> str | None:
        """Refuse units of FSDP inside of *stack*, and ZeRO-3.

        They gather a layer's parameters for its own backward, and let go of them after it.
        """
        for module in stack.modules():
            engine = engine_of_module(module)
            if module is not stack and engine.gathers_per_layer:
                return engine.reason(Feature.SEGMENTS)
        return ZERO_3.reason(Feature.SEGMENTS) if is_sharded_by_zero(stack) else None

    def weights_of(self, module: nn.Module) -> Iterable[torch.Tensor]:
        """Return the parameters of *module*, or the views that FSDP1 has put in their place."""
        weights: list[torch.Tensor] = [w for w in module._parameters.values() if w is not None]
        if not weights:
            weights = [v for v in vars(module).values() if isinstance(v, torch.Tensor)]
        return weights


def is_sharded_by_zero(module: nn.Module) -> bool:
    """Say whether DeepSpeed ZeRO-3 has sharded a parameter in *module*."""
    return any(map(ZERO_3.has, module.parameters()))


def is_sharded_for_calls(module: nn.Module) -> bool:
    """Say whether FSDP2 or ZeRO-3 gathers parameters in *module* in hooks around its calls."""
    return FSDP2.wraps(module) or is_sharded_by_zero(module)
