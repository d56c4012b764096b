"""Custom operators compute the same bits in a layer that is traced, also under autocast."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import library as torch_library
from torch import nn

from hf_pyao import ModuleMap, PyAOConfig, attach, register_module_map


@pytest.fixture
def product() -> Iterator[Any]:
    """Yield an operator whose kernel is Python code with a product in it."""
    with torch_library._scoped_library("pyao_operators", "FRAGMENT") as library:
        library.define("product(Tensor x, Tensor w) -> Tensor")
        library.impl("product", lambda x, w: (x @ w).float(), "CPU")
        library.impl("product", lambda x, w: x.new_empty(x.shape[0], w.shape[1]), "Meta")
        yield torch.ops.pyao_operators.product


class Product(torch.autograd.Function):
    """A product that an operator of someone else computes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, operator: Any) -> torch.Tensor:
        ctx.save_for_backward(w)
        result: torch.Tensor = operator(x, w)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (w,) = ctx.saved_tensors
        return grads[0] @ w.t(), None, None


class CustomLayer(nn.Module):
    def __init__(self, operator: Any, inner: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(16))
        self.act = nn.GELU()
        self._call = operator, inner

    def __deepcopy__(self, memo: Any) -> Any:
        other = CustomLayer(*self._call)
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        operator, inner = self._call
        with inner():
            x = Product.apply(x, self.weight, operator)
        return self.act(x * self.scale)


class CustomStack(nn.Module):
    def __init__(self, operator: Any, inner: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([CustomLayer(operator, inner) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _not_cast() -> Any:
    return torch.autocast("cpu", enabled=False)


@pytest.mark.parametrize("inner", [contextlib.nullcontext, _not_cast], ids=["on", "off inside"])
@pytest.mark.parametrize("is_cast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize(
    "settings",
    [{"recompute_modules": ("act",)}, {"checkpoint_every": 2}, {}],
    ids=["recomputed", "segments", "moved"],
)
def test_same_bits(settings: dict[str, Any], is_cast: bool, inner: Any, product: Any) -> None:
    register_module_map("CustomStack", ModuleMap(layers=("layers",)))
    torch.manual_seed(0)
    model = CustomStack(product, inner).train()
    x = torch.randn(8, 16)

    def run(module: nn.Module) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            loss = module(x).square().sum()
        loss.backward()
        return [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]

    expected = run(copy.deepcopy(model))
    with attach(
        model, PyAOConfig(**{"policy": "all", "min_bytes": 0, "keep_last_layers": 0, **settings})
    ):
        found = run(model)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
