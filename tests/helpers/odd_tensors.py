"""Layers that save or compute with tensors that have no memory, or that only a transform has.

Run in a process of its own: to read memory that is not there ends it. Prints, for each layer and
configuration, what came out; ``python -m tests.helpers.odd_tensors [CONFIGURATION]...``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from hf_pyao import attach
from hf_pyao.engine.codecs.narrow import NarrowCodec
from tests.helpers import EVERY_LAYER, Stack, assert_same_tensors, gradients_of

CONFIGS = {
    "identity": EVERY_LAYER,
    "narrow": replace(EVERY_LAYER, codec=NarrowCodec()),
    "bitmask": replace(EVERY_LAYER, codec="bitmask"),
    "pointwise": replace(EVERY_LAYER, recompute_modules=("pointwise",)),
    "all": replace(EVERY_LAYER, recompute_modules=("pointwise", "*")),
}


def tangent(layer: Any, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        primal, tangent = forward_ad.unpack_dual((dual @ layer.weight).tanh())
    return primal + 0.1 * tangent


def zero_tangent(layer: Any, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        still = forward_ad.make_dual(x, torch.zeros_like(x)) > 0
        result = (torch.relu(dual @ layer.weight) * still).exp() * layer.weight.sum()
        primal, tangent = forward_ad.unpack_dual(result)
    return primal + 0.1 * tangent


class SavesZeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        zeros = torch._efficientzerotensor((4, 4))
        no = torch._efficientzerotensor((4, 4), dtype=torch.bool)
        ctx.save_for_backward(zeros, zeros.expand(4, 4), zeros[1:], no, x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        zeros, view, part, no, x = ctx.saved_tensors
        return gradient * x + zeros + view + part.sum() + no


def saved_zeros(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return SavesZeros.apply(x @ layer.weight) + torch._efficientzerotensor((4, 4)) * layer.weight


def computed_zeros(layer: Any, x: torch.Tensor) -> torch.Tensor:
    zeros = torch._efficientzerotensor((4, 4))
    hidden = (x @ layer.weight).tanh() + zeros
    return (hidden * (zeros + 1) * zeros.exp()).sigmoid()


class SavesMeta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty(4, 4, device="meta"), None, x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        meta, nothing, x = ctx.saved_tensors
        assert meta.is_meta and nothing is None
        return gradient * x


def saved_meta(layer: Any, x: torch.Tensor) -> torch.Tensor:
    (torch.empty(4, 4, device="meta") @ layer.weight.detach().to("meta")).tanh()
    return SavesMeta.apply(x @ layer.weight).exp()  # type: ignore[no-any-return]


def fakes_beside(layer: Any, x: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode():
        (torch.empty(4, 4) * 2).tanh()
    return (x @ layer.weight).tanh().exp()


def without_memory(layer: Any, x: torch.Tensor) -> torch.Tensor:
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    return (x @ layer.weight).tanh() + torch.empty(0).expand(4, 0).sum() + freed[:0].sum()


def batched(layer: Any, x: torch.Tensor) -> torch.Tensor:
    rows = torch.vmap(lambda row: (row @ layer.weight).tanh().exp())(x)
    return torch.vmap(lambda row: F.dropout(row, 0.3), randomness="different")(rows)


def directional(layer: Any, x: torch.Tensor) -> torch.Tensor:
    value, derivative = torch.func.jvp(
        lambda v: (v @ layer.weight).tanh(), (x,), (torch.ones_like(x),)
    )
    return value + derivative.sin()


def linearized(layer: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = x @ layer.weight
    _, linear = torch.func.linearize(lambda v: (v @ layer.weight).tanh() + 0.1, x.detach())
    return hidden.tanh() + linear(torch.ones_like(x))


def jacobian(layer: Any, x: torch.Tensor) -> torch.Tensor:
    rows = torch.func.jacfwd(lambda v: (v @ layer.weight).tanh())(x[0])
    return (x @ layer.weight).tanh() + rows.sum()


def functionalized(layer: Any, x: torch.Tensor) -> torch.Tensor:
    def function(v: torch.Tensor) -> torch.Tensor:
        hidden = (v @ layer.weight).tanh()
        changed = hidden.clone()
        changed[0].mul_(2)
        return (changed * hidden).exp()

    return torch.func.functionalize(function)(x)


def backward_inside(layer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = (x @ layer.weight).tanh().exp().sum()
    (gradient,) = torch.autograd.grad(loss, layer.weight, create_graph=True)
    return (x @ layer.weight).sigmoid() * gradient


def conjugated(layer: Any, x: torch.Tensor) -> torch.Tensor:
    z = torch.complex(x @ layer.weight, x)
    negative = z.conj().imag
    return (z.conj() * z).real.tanh() + negative * negative.exp() + torch.view_as_real(z)[..., 0]


LAYERS: tuple[Callable[..., torch.Tensor], ...] = (
    tangent,
    zero_tangent,
    saved_zeros,
    computed_zeros,
    saved_meta,
    fakes_beside,
    without_memory,
    batched,
    directional,
    linearized,
    jacobian,
    functionalized,
    backward_inside,
    conjugated,
)


def gradients(model: Stack) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None
    return {**gradients_of(model), "x": x.grad}


def outcome(function: Callable[..., torch.Tensor], config: str) -> str:
    """Compare two steps with plain torch; say what came out, in a word."""
    model = Stack(function, function)
    expected = [gradients(plain) for plain in (copy.deepcopy(model), copy.deepcopy(model))]
    try:
        with attach(model, CONFIGS[config]) as offloader:
            for step in expected:
                model.zero_grad()
                assert_same_tensors(gradients(model), step, "attached")
            assert offloader.host_pool.settle() == 0
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "same"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for function in LAYERS:
        for config in sys.argv[1:] or CONFIGS:
            sys.stdout.write(f"{function.__name__} {config} ")
            sys.stdout.flush()
            sys.stdout.write(outcome(function, config) + "\n")
