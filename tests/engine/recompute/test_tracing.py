"""What the trace sees, what it cannot see, and what becomes of that: stored, never wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import Offloader, PyAOConfig, attach
from hf_pyao.engine.recompute.recipes import NO_RECIPE, NOT_SEEN
from hf_pyao.engine.runtime.lifecycle import COMPILED
from hf_pyao.errors import SavedTensorModifiedError
from hf_pyao.training_engines import ZERO_3, Feature
from tests.helpers import EVERY_LAYER, FunctionLayer, Stack, linear_relu
from tests.helpers.recompute_sets import ALONE

SIZE = 64
"""Large enough that an activation (rows of this size) is no tiny constant."""

POINTWISE = replace(ALONE, recompute_modules=("pointwise",))
EVERYTHING = replace(ALONE, recompute_modules=("*",))

Function = Callable[[FunctionLayer, torch.Tensor], torch.Tensor]


class HiddenScale(torch.autograd.Function):
    """Doubles in numpy, which no dispatcher sees, into memory that torch allocated."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out.numpy()[...] = x.detach().numpy() * 2
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 + 0 * x


class HiddenInPlace(torch.autograd.Function):
    """Changes its input in numpy and returns it, as fused rotary kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.detach().numpy()[...] *= 2
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def run(
    config: PyAOConfig, *functions: Function, size: int = SIZE
) -> tuple[Offloader, dict[str, float]]:
    """Train one step of a model of *functions*, and compare with a model that is not attached."""
    model = Stack(*functions, size=size)
    plain = copy.deepcopy(model)
    x = torch.randn(8, size, generator=torch.Generator().manual_seed(1))
    results = []
    with attach(model.train(), config) as offloader:
        for one in (plain.train(), model):
            torch.manual_seed(2)
            leaf = x.clone().requires_grad_()
            loss = one(leaf).square().sum()
            loss.backward()
            gradients = [layer.weight.grad for layer in one.layers]
            results.append([loss.detach(), leaf.grad, *gradients, torch.get_rng_state()])
        metrics = offloader.metrics()
    for found, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(found, expected)
    return offloader, metrics


def gelu_of_product(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    product = x @ layer.weight
    return torch.tanh(product.square() * torch.sigmoid(product)) @ layer.weight


@pytest.mark.parametrize("function", [HiddenScale, HiddenInPlace])
@pytest.mark.parametrize("config", [POINTWISE, EVERYTHING], ids=["pointwise", "everything"])
def test_what_a_custom_function_hides_is_stored(function: Any, config: PyAOConfig) -> None:
    def layer_function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        product = (x @ layer.weight).clone()
        hidden = function.apply(product)
        return torch.tanh(hidden * hidden.sin())

    _, metrics = run(config, layer_function, layer_function)
    stored = metrics[f"not_recomputed_bytes/{NOT_SEEN}"]
    assert stored >= 2 * 8 * SIZE * 4  # the hidden results, of both layers
    assert metrics["recomputed_bytes"] > 0  # what was made from them


def test_memory_filled_by_no_one_that_is_seen_is_no_source() -> None:
    def layer_function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        scale = torch.empty_like(x, requires_grad=False)
        scale.numpy()[...] = 3.0  # a kernel outside of any function
        return (x @ layer.weight) * scale.sin()

    _, metrics = run(EVERYTHING, layer_function)
    assert metrics["recomputed_bytes"] < 8 * SIZE * 4
    assert metrics[f"not_recomputed_bytes/{NO_RECIPE}"] == 8 * SIZE * 4


def test_a_product_runs_again_only_where_it_was_asked_for() -> None:
    _, metrics = run(POINTWISE, gelu_of_product)
    slot = 8 * SIZE * 4
    # x, and the product; the square, the sigmoid and tanh's result are rebuilt.
    assert metrics["held_bytes"] == 2 * slot
    assert metrics["recomputed_bytes"] == metrics["would_hold_bytes"] - 2 * slot
    _, metrics = run(EVERYTHING, gelu_of_product)
    assert metrics["held_bytes"] == slot


def test_a_cast_is_derived_from_its_smaller_source() -> None:
    """As RMSNorm saves the fp32 copy of its 16-bit input, which no one saves."""

    def norm(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        half = (x @ layer.weight).to(torch.bfloat16)
        wide = half.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)

    _, metrics = run(POINTWISE, norm)
    slot = 8 * SIZE * 4
    assert metrics["held_bytes"] == slot + slot // 2  # x, and the 16-bit input
    assert metrics["recomputed_bytes"] == metrics["would_hold_bytes"] - slot


@pytest.mark.parametrize("with_newer", [False, True])
def test_a_source_of_which_only_a_view_lives_is_stored(with_newer: bool) -> None:
    """As the queries that a norm gets: what the product returned is gone, a view of it lives.

    Newer views may be gone: those by which attention repeats keys are.
    """

    def norm(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        half = torch.ops.aten._unsafe_view((x @ layer.weight).to(torch.bfloat16), (4, 2, SIZE))
        wide = half[:, None].float()[:, 0] if with_newer else half.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).view(8, SIZE)

    _, metrics = run(POINTWISE, norm)
    slot = 8 * SIZE * 4
    assert metrics["held_bytes"] == slot + slot // 2  # x, and the 16-bit input
    assert metrics["recomputed_bytes"] == metrics["would_hold_bytes"] - slot


def test_a_source_changed_after_it_was_stored_raises() -> None:
    kept: list[torch.Tensor] = []

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        half = (x @ layer.weight).to(torch.bfloat16)
        kept.append(half)
        return half.float().square()

    for base in (ALONE, EVERY_LAYER):
        model = Stack(function, size=SIZE).train()
        with attach(model, replace(base, recompute_modules=("pointwise",))):
            loss = model(torch.randn(8, SIZE)).sum()
            with torch.no_grad():
                kept.pop().zero_()
            with pytest.raises(SavedTensorModifiedError, match=r"layers\.0"):
                loss.backward()


def test_a_source_that_the_layer_itself_changes_later_is_read_as_it_was() -> None:
    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ layer.weight
        places = hidden.detach().abs().clamp(max=SIZE - 1.0)
        below = x.gather(-1, places.long())  # `long` is computed again from `places`
        return below * hidden.gather(-1, places.ceil_().long())

    for base in (ALONE, EVERY_LAYER):
        _, metrics = run(replace(base, recompute_modules=("pointwise",)), function, linear_relu)
        assert metrics["recomputed_bytes"] > 0


def test_a_dropped_tensor_changed_after_it_was_saved_raises() -> None:
    kept: list[torch.Tensor] = []

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        kept.append(torch.sigmoid(x @ layer.weight))
        return kept[0].square()

    model = Stack(function, size=SIZE).train()
    with attach(model, EVERYTHING):
        loss = model(torch.randn(8, SIZE)).sum()
        with torch.no_grad():
            kept.pop().zero_()
        with pytest.raises(SavedTensorModifiedError, match=r"layers\.0"):
            loss.backward()


def test_a_parameter_changed_before_backward_raises() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([FunctionLayer(self._function, SIZE)])
            self.shift = nn.Parameter(torch.ones(SIZE))

        def _function(self, layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid((x @ layer.weight) + self.shift)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x)

    model = Scaled().train()
    with attach(model, EVERYTHING):
        loss = model(torch.randn(8, SIZE)).sum()
        with torch.no_grad():
            model.shift.add_(1)  # autograd itself saves no copy of it
        with pytest.raises(SavedTensorModifiedError, match="a parameter of shape"):
            loss.backward()


def test_operations_with_gradients_off_are_of_unknown_origin() -> None:
    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.square().mean(-1, keepdim=True).expand_as(x).clone()
        return (x @ layer.weight) * scale

    _, metrics = run(POINTWISE, function)
    assert metrics[f"not_recomputed_bytes/{NOT_SEEN}"] >= 8 * SIZE * 4


@pytest.mark.parametrize("reason", [COMPILED, ZERO_3.reason(Feature.RECOMPUTATION)])
def test_layers_that_cannot_be_traced_are_stored(reason: str) -> None:
    model = Stack(gelu_of_product, size=SIZE).train()
    layer = model.layers[0]
    if reason != COMPILED:
        layer.weight.ds_id = 0
    else:
        layer.inner = torch.compile(nn.Linear(4, 4), backend="eager")
    with attach(model, EVERYTHING) as offloader:
        model(torch.randn(8, SIZE)).sum().backward()
        metrics = offloader.metrics()
    assert metrics["recomputed_bytes"] == 0
    assert metrics[f"not_recomputed_bytes/{reason}"] == metrics["would_hold_bytes"] > 0


def test_saved_tensors_may_be_looked_at_outside_of_backward() -> None:
    model = Stack(gelu_of_product, size=SIZE).train()
    with attach(model, replace(EVERY_LAYER, recompute_modules=("*",))):
        out = model(torch.randn(8, SIZE, requires_grad=True))
        tanh = out.grad_fn.next_functions[0][0]
        first = tanh._saved_result.clone()
        out.sum().backward()
        assert first.abs().sum() > 0
        gradient = model.layers[0].weight.grad.clone()
    model.zero_grad()
    assert gradient.abs().sum() > 0
