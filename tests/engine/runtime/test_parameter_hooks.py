"""Layers that hang hooks on their own weights in forward: a second run hangs no second one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_pyao import OutOfDeviceMemoryError, attach
from tests.helpers import EVERY_LAYER, Stack, assert_same_tensors, gradients_of, linear_relu

Layer = Callable[[Any, torch.Tensor], torch.Tensor]


def once(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(layer, "is_hooked"):
        layer.is_hooked = True
        layer.weight.register_hook(lambda grad: 2 * grad)
    return torch.sin(x @ layer.weight)


def each_time(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if hasattr(layer, "handle"):
        layer.handle.remove()
    layer.handle = layer.weight.register_hook(lambda grad: grad / 2)
    return torch.sin(x @ layer.weight)


def never_again(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Takes a hook off that is there from the second forward on."""
    if hasattr(layer, "handle"):
        layer.handle.remove()
        del layer.handle
    else:
        layer.handle = layer.weight.register_hook(lambda grad: grad * 3)
    return torch.sin(x @ layer.weight)


def widen(weight: torch.Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(1.5)


def behind_the_sum(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(layer, "num_sums"):
        layer.num_sums = 0
        layer.weight.register_post_accumulate_grad_hook(widen)
    return torch.tanh(x @ layer.weight)


LAYERS = (once, each_time, never_again, behind_the_sum)


def gradients(model: Stack, run: Callable[[Callable[[], None]], None]) -> dict[str, torch.Tensor]:
    def micro_batch() -> None:
        model(torch.linspace(-1, 1, 8).view(2, 4)).square().sum().backward()

    for _ in range(3):
        run(micro_batch)
    return gradients_of(model)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.sampled(every=3)
def test_a_layer_that_runs_again(layer: Layer, every: int) -> None:
    layers = (linear_relu, layer, layer)
    expected = gradients(Stack(*layers), lambda micro_batch: micro_batch())
    model = Stack(*layers)

    with attach(model, EVERY_LAYER.with_settings(checkpoint_every=every)):
        found = gradients(model, lambda micro_batch: micro_batch())

    assert_same_tensors(found, expected, layer.__name__)
    assert not model.layers[0].weight._backward_hooks


@pytest.mark.parametrize("layer", [once, behind_the_sum])
def test_a_micro_batch_that_hung_hooks_does_not_run_again(layer: Layer) -> None:
    def fails(_: Any, x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    model = Stack(layer, fails, linear_relu)
    with attach(model, EVERY_LAYER) as offloader:
        with pytest.raises(OutOfDeviceMemoryError, match="it changes hooks"):
            gradients(model, offloader.run_micro_batch)


def freezes_and_thaws(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.weight.requires_grad_(not layer.weight.requires_grad)
    return torch.sin(x @ layer.weight)


def test_a_second_run_that_freezes_a_weight_leaves_it_as_it_was() -> None:
    """Two forwards before their backwards: the first one's second run freezes the weight."""

    def train(model: Stack) -> dict[str, torch.Tensor]:
        x = torch.linspace(-1, 1, 8).view(2, 4)
        losses = [model(x + number).square().sum() for number in range(2)]
        for loss in reversed(losses):
            loss.backward()
        assert all(layer.weight.requires_grad for layer in model.layers)
        return gradients_of(model)

    layers = (linear_relu, freezes_and_thaws, linear_relu)
    expected = train(Stack(*layers))
    model = Stack(*layers)

    with attach(model, EVERY_LAYER.with_settings(checkpoint_every=1)):
        assert_same_tensors(train(model), expected, "frozen in every other forward")
