"""Small MLPs, and their gradients whole and in tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hf_pyao.model.tiles.sliced import Rerun, run_in_slices
from hf_pyao.plan.options.tile_plan import TilePlan, plan_tiles
from tests.helpers import gradients_of

HIDDEN = 32
INNER = 80


class GatedMLP(nn.Module):
    """As in Llama, with biases, and dropout if asked for."""

    def __init__(self, dropout: float = 0.0, hidden: int = HIDDEN, inner: int = INNER) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner)
        self.up = nn.Linear(hidden, inner)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(inner, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the same shape."""
        return self.down(self.dropout(F.silu(self.gate(hidden)) * self.up(hidden)))


def plan_of(hidden: Tensor, tiles: int) -> TilePlan:
    """Return the plan for *tiles* tiles of *hidden*."""
    return plan_tiles(hidden[..., 0].numel(), tiles, 0, 0)


def tiled(module: nn.Module, tiles: int, **options: Any) -> Callable[..., Tensor]:
    """Return what runs *module* in *tiles* tiles."""

    def run(*inputs: Tensor) -> Tensor:
        weights = lambda: list(module.parameters())  # noqa: E731
        plan = plan_of(inputs[0], tiles)
        return run_in_slices(module.forward, inputs, weights, plan, Rerun(**options))

    return run


def gradients(
    function: Callable[..., Tensor], module: nn.Module, hidden: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Return output, gradient of the input, and gradients of the weights that have one."""
    module.zero_grad()
    leaf = hidden.detach().requires_grad_(hidden.requires_grad)
    output = function(leaf)
    output.backward(grad.to(output.dtype))
    weights = gradients_of(module)
    return output.detach(), leaf.grad, weights


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference by the norm of *expected*."""
    true = expected.detach().double()
    return float((found.detach().double() - true).norm() / true.norm().clamp_min(1e-300))


def median(values: Sequence[float]) -> float:
    """Return the middle one of an odd number of values."""
    return sorted(values)[len(values) // 2]
