"""Two models that share frozen parameters, both of them streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.weights.test_streaming import llama, loss_of, streamed
from tests.helpers import gradients_of

Pair = tuple[nn.Module, nn.Module]


def shared(is_shared: Callable[[str], bool]) -> Pair:
    """Return two models with adapters of their own; the second has frozen weights of the first.

    Args:
        is_shared: says of a parameter's qualified name whether both have it.
    """
    first, second = llama(), llama()
    with torch.no_grad():
        for parameter in second.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01)
    for (name, owner), other in zip(first.named_modules(), second.modules(), strict=True):
        for key, parameter in owner._parameters.items():
            is_frozen = parameter is not None and not parameter.requires_grad
            if is_frozen and is_shared(f"{name}.{key}"):
                other._parameters[key] = parameter
    return first, second


SHARES: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "attention": lambda name: "self_attn" in name,
    "two layers": lambda name: ".layers.1." in name or ".layers.3." in name,
}


def one_after_the_other(pair: Pair) -> None:
    for model in pair:
        loss_of(model).backward()


def one_inside_the_other(pair: Pair) -> None:
    first, second = map(loss_of, pair)
    second.backward()
    first.backward()


def change(pair: Pair) -> None:
    """Change a shared weight in place, another one's data, and load the first model's state."""
    weights = [p for name, p in pair[0].named_parameters() if "q_proj.base_layer" in name]
    with torch.no_grad():
        weights[1].mul_(1.5)
    weights[3].data = weights[3].data * 0.5
    pair[0].load_state_dict({name: 0.9 * each for name, each in pair[0].state_dict().items()})


def assert_same(found: Pair, expected: Pair) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        gradients = gradients_of(ours)
        for name, gradient in gradients_of(theirs).items():
            assert torch.equal(gradients[name], gradient), name
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q), name


@pytest.mark.parametrize("stay", [(0, 0), (0, 2)], ids=str)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.sampled(every=5)
def test_bits_are_those_of_the_resident_models(
    share: str, order: tuple[int, ...], stay: tuple[int, int]
) -> None:
    """While both are streamed, after changes, and when one of them was detached."""
    pair, expected = shared(SHARES[share]), shared(SHARES[share])
    offloaders: list[Any] = [streamed(model, n) for model, n in zip(pair, stay, strict=True)]
    for loop in (one_after_the_other, one_inside_the_other):
        for models in (pair, expected):
            loop(models)
            change(models)
            loop(models)
        assert_same(pair, expected)
    for number in order:
        offloaders[number].detach()
        for models in (pair, expected):
            one_inside_the_other(models)
            change(models)
            one_inside_the_other(models)
        assert_same(pair, expected)


def test_weights_of_whole_layers_are_on_the_host_once() -> None:
    pair = shared(SHARES["all"])
    with streamed(pair[0]) as first, streamed(pair[1]) as second:
        memories = [
            [block.memory.untyped_storage()._cdata for block in each.weights.blocks]
            for each in (first, second)
        ]
        assert memories[0] == memories[1]
