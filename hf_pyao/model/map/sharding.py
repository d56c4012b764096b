"""Recognises parameters that ZeRO-3, FSDP and their like have sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

ZERO_3 = "parameters gathered by ZeRO-3"

_GATHERING = frozenset({"FSDPModule", "FullyShardedDataParallel"})
"""Classes of modules that gather their parameters as they run: FSDP2's, and FSDP1's."""


class KnownSharding:
    """Sharding by DeepSpeed ZeRO-3 and FSDP; FSDP2's needs no case of its own."""

    def reason_not_traceable(self, module: nn.Module) -> str | None:
        """Refuse ZeRO-3: the data of a parameter is another by the time of replay."""
        return ZERO_3 if any(map(is_sharded_by_zero, module.parameters())) else None

    def reason_to_run_alone(self, stack: nn.Module) -> str | None:
        """Refuse units of FSDP inside of *stack*, and ZeRO-3.

        They gather a layer's parameters for its own backward, and let go of them after it.
        """
        for module in stack.modules():
            kinds = {kind.__name__ for kind in type(module).__mro__}
            if module is not stack and _GATHERING & kinds:
                return "FSDP gathers parameters for the backward of one layer at a time"
        if any(map(is_sharded_by_zero, stack.parameters())):
            return "ZeRO-3 gathers parameters for one layer at a time"
        return None

    def weights_of(self, module: nn.Module) -> Iterable[torch.Tensor]:
        """Return the parameters of *module*, or the views that FSDP1 has put in their place."""
        weights: list[torch.Tensor] = [w for w in module._parameters.values() if w is not None]
        if not weights:
            weights = [v for v in vars(module).values() if isinstance(v, torch.Tensor)]
        return weights


def is_sharded_by_zero(parameter: torch.Tensor) -> bool:
    """Say whether DeepSpeed ZeRO-3 has sharded *parameter*."""
    return hasattr(parameter, "ds_id")
