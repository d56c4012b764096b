"""Forwards inside a backward pass: those of one's own are offloaded, recomputation is passed over.

See [Note: Forwards inside a backward pass] in ``hf_pyao/engine/torch_hooks/passing_over.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_pyao import PyAOConfig, attach
from tests.helpers import (
    EVERY_LAYER,
    FunctionLayer,
    Stack,
    assert_same_tensors,
    gradients_of,
    linear_relu,
    tiny_batch,
    tiny_model,
)

CONFIGS = {
    "layer": EVERY_LAYER,
    "bytes": replace(EVERY_LAYER, window=2048),
    "nothing ahead": replace(EVERY_LAYER, window=0),
    "recompute": replace(EVERY_LAYER, recompute_modules=("pointwise", "*"), window=2048),
}
IDS = tiny_batch(0)["input_ids"]


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def config(request: pytest.FixtureRequest) -> PyAOConfig:
    return request.param  # type: ignore[no-any-return]


def cached_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Do as GradCache: the loss's gradient first, then a forward with backward in a hook."""
    model.zero_grad()
    with torch.no_grad():
        hidden = model.model(input_ids=IDS, use_cache=False).last_hidden_state
    hidden.requires_grad_()

    def again(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            again = model.model(input_ids=IDS, use_cache=False).last_hidden_state
            (again * gradient).sum().backward()

    hidden.register_hook(again)
    hidden.pow(2).sum().backward()
    return gradients_of(model)


def test_a_forward_in_a_tensors_hook_is_offloaded(
    config: PyAOConfig, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama", dropout=0.0)
    expected = cached_gradients(model)
    with attach(model, config) as offloader, caplog.at_level(logging.WARNING, "hf_pyao"):
        for _ in range(3):
            assert_same_tensors(cached_gradients(model), expected, "attached")
            assert offloader.metrics()["offloaded_bytes"] > 0
            assert offloader.metrics()["reloaded_bytes"] > 0
            assert offloader.host_pool.settle() == 0
    assert not caplog.records


@pytest.mark.parametrize("hook", ["tensor", "module"])
def test_a_step_inside_the_backward_of_the_same_layers(hook: str, config: PyAOConfig) -> None:
    """The outer backward goes on over layers whose tensors are still away."""

    def step(model: Stack) -> dict[str, torch.Tensor]:
        model.zero_grad()
        x = torch.linspace(-1, 1, 16).view(4, 4)
        is_inside = False

        def inner(*_: Any) -> None:
            nonlocal is_inside
            if not is_inside:
                is_inside = True
                with torch.enable_grad():
                    model(x * 2).square().sum().backward()

        if hook == "module":
            handle = model.layers[1].register_full_backward_hook(inner)
        hidden = model.layers[1](model.layers[0](x))
        if hook == "tensor":
            handle = hidden.register_hook(inner)
        model.layers[3](model.layers[2](hidden)).square().sum().backward()
        handle.remove()
        assert is_inside
        return gradients_of(model)

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        return (x + (x @ layer.weight).tanh()).exp().sigmoid()

    model = Stack(*[function] * 4)
    expected = step(model)
    with attach(model, config) as offloader:
        for _ in range(2):
            assert_same_tensors(step(model), expected, "attached")
            assert offloader.host_pool.settle() == 0
        assert offloader.engine.num_layer_calls == 2 * (4 + 4)


class Recomputing(torch.autograd.Function):
    """Runs *run* again in its backward, as checkpoints of other libraries do."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.run(x)
        torch.autograd.backward(output, gradient)
        return None, x.grad


AROUND: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "another library's": (Recomputing.apply, "counts as recomputation"),
    "reentrant": (
        lambda run, x: checkpoint(run, x, use_reentrant=True),  # type: ignore[return-value]
        "counts as recomputation",
    ),
    "not reentrant": (
        lambda run, x: checkpoint(run, x, use_reentrant=False),  # type: ignore[return-value]
        "inside a checkpoint",
    ),
}


@pytest.mark.parametrize("around", AROUND)
def test_a_checkpoint_around_the_model_is_passed_over_and_named(
    around: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, said = AROUND[around]
    model = Stack(linear_relu, linear_relu)

    def step() -> dict[str, torch.Tensor]:
        model.zero_grad()
        run(model, torch.ones(4, 4, requires_grad=True)).square().sum().backward()
        return gradients_of(model)

    expected = step()
    with attach(model, EVERY_LAYER) as offloader, caplog.at_level(logging.WARNING, "hf_pyao"):
        assert_same_tensors(step(), expected, "attached")
        offloader.warn_if_idle()
        assert offloader.engine.num_packs == 0
    (message,) = [record.getMessage() for record in caplog.records]
    assert said in message
    assert "eval mode" not in message


# ---- where hooks are forbidden -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["disable_saved_tensors_hooks", "torch.func.grad"])
def test_a_layer_that_forbids_hooks_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def forbids(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        if name == "torch.func.grad":
            return x @ torch.func.grad(lambda w: (x @ w).tanh().sum())(layer.weight)
        with torch.autograd.graph.disable_saved_tensors_hooks("none of them here"):
            return linear_relu(layer, x)

    model = Stack(linear_relu, forbids)
    model(torch.ones(4, 4)).sum().backward()
    with attach(model, EVERY_LAYER):
        with pytest.raises(RuntimeError, match="none of them here|torch.func"):
            model(torch.ones(4, 4))
        (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert "'layers.1' forbids saved-tensor hooks" in record.getMessage()
        caplog.clear()
        model.layers[1].function = lambda layer, x: x / 0
        model(torch.ones(4, 4))
        model.layers[1].function = lambda layer, x: x @ x[0, 1:]
        with pytest.raises(RuntimeError, match="size mismatch"):
            model(torch.ones(4, 4))
        assert not caplog.records
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
