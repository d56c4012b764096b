"""Second runs that fail, or that cannot be, are taken back: training goes on with the same bits."""

from __future__ import annotations

import array
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import OutOfDeviceMemoryError, PyAOConfig, attach
from hf_pyao.errors import ConflictError
from hf_pyao.hf.micro_batch.trial_step import check_undoable, undisturbed
from tests.helpers import EVERY_LAYER, FunctionLayer, Stack, assert_same_tensors, gradients_of

INPUT = torch.linspace(-1, 1, 12).view(3, 4)
BY_ONE = dataclasses.replace(EVERY_LAYER, checkpoint_every=1)


def micro_batch(model: nn.Module) -> None:
    model(INPUT).square().sum().backward()


def iterates(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x @ layer.weight * (1 + next(layer.numbers)))


def test_a_state_that_cannot_be_put_back_is_refused_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = []
    for config in (None, BY_ONE):
        model = Stack(iterates)
        model.layers[0].numbers = itertools.count()
        if config is None:
            micro_batch(model)
        else:
            with attach(model, config):
                micro_batch(model)
        found.append(gradients_of(model))
    assert_same_tensors(found[1], found[0], "")
    assert "'numbers'" in caplog.text
    with pytest.raises(ConflictError, match="'layers.0.numbers'"):
        check_undoable(model)


def test_a_trial_leaves_attributes_as_they_were() -> None:
    model = Stack(iterates, iterates)
    layer = model.layers[0]
    layer.seen, layer.mean = [1], torch.zeros(2, 3)
    with undisturbed(model):
        layer.seen = [2]
        layer.mean.add_(1)
        model.eval()
    assert layer.seen == [1]
    assert not layer.mean.any()
    assert model.training
    assert layer.training


def fills_a_list(layer: Any) -> None:
    layer.seen[0]["n"] = 2


def adds_a_module(layer: Any) -> None:
    layer.added = nn.Linear(2, 2)


def hooks_a_layer(layer: Any) -> None:
    layer.register_forward_hook(lambda *_: None)


def writes_an_array(layer: Any) -> None:
    layer.counted[1] += 3


@pytest.mark.parametrize("change", [fills_a_list, hooks_a_layer, adds_a_module, writes_an_array])
def test_what_a_trial_cannot_put_back_is_named(change: Callable[[Any], None]) -> None:
    model = Stack(iterates)
    model.layers[0].seen, model.layers[0].counted = [{"n": 1}], array.array("q", [0, 0])
    with pytest.raises(ConflictError, match="seen' holds|counted' holds|hooks on its modules"):
        with undisturbed(model):
            change(model.layers[0])


def steps_in_a_module_s_backward(model: Stack) -> None:
    def step(module: nn.Module, *_: Any) -> None:
        for parameter in model.layers[1].parameters(recurse=False):
            parameter.data.sub_(0.1)

    model.layers[1].register_full_backward_hook(step)


def test_a_hook_of_a_module_s_backward_ends_the_run() -> None:
    model = Stack(lambda layer, x: torch.sin(x @ layer.weight), cosine)
    steps_in_a_module_s_backward(model)
    with attach(model, PyAOConfig(min_bytes=0, layers=("layers.*",))) as offloader:

        def two_losses() -> None:
            micro_batch(model)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

        with pytest.raises(OutOfDeviceMemoryError, match="hooks on modules run in backward"):
            offloader.run_micro_batch(two_losses, writes_only_this_model=True)


def cosine(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    return torch.cos(x @ layer.weight)
