"""What hooks must know of engines that shard parameters; ``model/map/`` knows which there are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class Sharding:
    """What becomes of a module's parameters while it runs; here they stay where they are."""

    def reason_not_traceable(self, module: nn.Module) -> str | None:
        """Say why operations on *module*'s parameters cannot be run again; None if they can."""
        return None

    def reason_to_run_alone(self, stack: nn.Module) -> str | None:
        """Say why no two layers of *stack* can run in the backward of one; None if they can."""
        return None

    def weights_of(self, module: nn.Module) -> Iterable[torch.Tensor]:
        """Return the weights of *module* itself, as they are while it runs."""
        return [weight for weight in module._parameters.values() if weight is not None]
