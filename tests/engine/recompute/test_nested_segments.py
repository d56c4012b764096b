"""Segments whose layers run again one by one: what runs when, what is held, what is refused."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from tests.engine.recompute.test_segments import INPUT, lifecycle_of, step
from tests.helpers import (
    EVERY_LAYER,
    FunctionLayer,
    Stack,
    assert_same_tensors,
    linear_relu,
)
from tests.helpers.ledger import AllocationLedger

LENGTHS = (2, 3, 100)


def nested(length: int, **settings: Any) -> PyAOConfig:
    return dataclasses.replace(
        EVERY_LAYER, checkpoint_every=length, checkpoint_nested=True, **settings
    )


def check(*functions: Callable[..., Any]) -> None:
    """Check that layers that compute *functions* have the same gradients, whatever the length."""
    for length in LENGTHS:
        model = Stack(*functions)
        expected = step(copy.deepcopy(model))
        with attach(model, nested(length)) as offloader:
            assert_same_tensors(step(model), expected, f"length {length}")
            assert lifecycle_of(offloader).filled.num_runs == len(functions)
            assert not list(lifecycle_of(offloader).filled._segments)
            assert offloader.host_pool.settle() == 0
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_the_order_in_which_layers_run_again() -> None:
    """First those before the last for their outputs; then each as backward comes to it."""
    ran: list[str] = []

    def counted(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        ran.append(layer.name)
        x = torch.relu(x @ layer.weight)
        ran.append("whole")
        return x + 1

    model = Stack(counted, counted, counted, counted, counted)
    for layer, name in zip(model.layers, "abcde", strict=True):
        layer.name = name
        layer.weight.register_hook(lambda _, name=name: ran.append(f"backward of {name}"))
    with attach(model, nested(3)) as offloader:
        x = INPUT.clone().requires_grad_()
        out = model(x)
        assert ran == "a whole b whole c whole d whole e whole".split()
        ran.clear()
        out.square().sum().backward()
        metrics = offloader.metrics()
    expected = ["d", "whole", "e", "backward of e", "d", "backward of d"]
    expected += ["a", "whole", "b", "whole", "c", "backward of c"]
    expected += ["b", "backward of b", "a", "backward of a"]
    assert ran == expected
    assert metrics["offloaded_bytes"] == metrics["reloaded_bytes"] == 2 * INPUT.nbytes


# ---- backward of a part ---------------------------------------------------------------------------


def test_a_backward_that_comes_to_a_part_only() -> None:
    """First the first layer alone, then the others: what is not held any more is made again."""
    seen: list[torch.Tensor] = []

    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        x = INPUT.clone().requires_grad_()
        seen.clear()
        out = model(x)
        weights = [layer.weight for layer in model.layers]
        found = torch.autograd.grad(seen[0].sum(), weights[0], retain_graph=True)
        found += torch.autograd.grad(seen[1].sum(), weights[:2], retain_graph=True)
        found += torch.autograd.grad(out.square().sum(), [x, *weights])
        return dict(zip("abcdefg", found, strict=True))

    def keeping(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        out = torch.sin(x @ layer.weight)
        if torch._C._current_graph_task_id() == -1:
            seen.append(out)
        return out

    model = Stack(keeping, keeping, keeping)
    expected = run(copy.deepcopy(model))
    with attach(model, nested(3)) as offloader:
        assert_same_tensors(run(model), expected, "")
        assert lifecycle_of(offloader).filled.num_runs == 1 + 2 + 3


# ---- failures ------------------------------------------------------------------------------------


def test_a_layer_that_changes_its_input_runs_once(caplog: pytest.LogCaptureFixture) -> None:
    """As where each layer's input is saved: what layers before made is given twice."""

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.add_(1) @ layer.weight)

    def plus_one(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight + 1

    model = Stack(plus_one, function, linear_relu)
    expected = step(copy.deepcopy(model))
    for config in (nested(3), dataclasses.replace(nested(3), checkpoint_nested=False)):
        with attach(model, config) as offloader:
            for _ in range(2):
                assert_same_tensors(step(model), expected, "")
            assert offloader.host_pool.settle() == 0
    assert r"'layers.1' does not run again: it changes in place" in caplog.text


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 4, 8])
@pytest.mark.sampled(every=1000)
def test_memory(length: int) -> None:
    """By so many layers: inputs that are kept, those between, and the tensors of one layer."""
    nbytes, num_layers = 4096 * 8 * 4, 8

    def wide(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.sin(x @ layer.weight)
        return x

    def peak_bytes(length: int, *, is_nested: bool, is_retained: bool = False) -> int:
        model = Stack(*[wide] * num_layers, size=8)
        x = torch.randn(4096, 8)
        config = PyAOConfig(
            policy="off",  # what is kept counts: the host's copies would too
            host_memory_gib=0.1,
            keep_last_layers=0,
            min_bytes=0,
            checkpoint_every=length,
            checkpoint_nested=is_nested,
        )
        with attach(model, config):
            model(x).sum().backward()  # what is allocated once
            with AllocationLedger() as ledger:
                model(x).sum().backward(retain_graph=is_retained)
        return ledger.peak_bytes

    layer = 12 * nbytes  # of six operations: what goes in, what comes out
    slack = 4 * nbytes  # gradients, and the layer's own arithmetic
    kept_bytes = (num_layers // length + length - 1) * nbytes
    assert peak_bytes(length, is_nested=True) <= kept_bytes + layer + slack
    assert peak_bytes(length, is_nested=False) > kept_bytes + 1.5 * layer + slack
    if length == 4:
        retained = peak_bytes(length, is_nested=True, is_retained=True)
        assert retained <= kept_bytes + 2 * layer + slack  # the one before goes as one begins
