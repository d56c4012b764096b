"""What hooks must know of engines that shard parameters; ``model/map/`` knows which there are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn


class Sharding(Protocol):
    """What becomes of a module's parameters while it runs."""

    def reason_not_traceable(self, module: nn.Module) -> str | None:
        """Say why operations on *module*'s parameters cannot be run again; None if they can."""
        ...

    def reason_to_run_alone(self, stack: nn.Module) -> str | None:
        """Say why no two layers of *stack* can run in the backward of one; None if they can."""
        ...

    def weights_of(self, module: nn.Module) -> Iterable[torch.Tensor]:
        """Return the weights of *module* itself, as they are while it runs."""
        ...


class NoSharding:
    """Parameters are where modules have them."""

    def reason_not_traceable(self, module: nn.Module) -> str | None:
        """Return None."""
        return None

    def reason_to_run_alone(self, stack: nn.Module) -> str | None:
        """Return None."""
        return None

    def weights_of(self, module: nn.Module) -> Iterable[torch.Tensor]:
        """Return the module's parameters."""
        return [weight for weight in module._parameters.values() if weight is not None]
