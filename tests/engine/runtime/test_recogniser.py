"""Parameters are recognised in every guise in which they reach the pack hook, and nothing else is.

On whole models, by value, under autocast, LoRA and frozen weights: ``test_counting.py``. Under DDP,
FSDP1 and FSDP2: ``tests/distributed``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from hf_pyao import Offloader, attach
from hf_pyao.engine.runtime.parameters import FrozenShapes, is_parameter
from hf_pyao.engine.runtime.saved_tensor import KeptTensor
from tests.helpers import EVERY_LAYER, FunctionLayer, Stack

NONE = FrozenShapes()


class Small(nn.Module):
    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.table = Parameter(torch.randn(6, 4))
        self.requires_grad_(not frozen)


def cast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16)


GUISES = {
    "itself": lambda p: p,
    "transposed": lambda p: p.t(),
    "row": lambda p: p[1],
    "view of a view": lambda p: p.view(-1)[3:9].view(2, 3),
    "cast": cast,
    "transposed cast": lambda p: cast(p).t(),
    "cast of a view": lambda p: cast(p[1:]),
    "chunk": lambda p: p.chunk(2)[1],
    "split cast": lambda p: cast(p).split(2)[0],
    "unbound": lambda p: p.unbind()[0],
}
ACTIVATIONS = {
    "scaled": lambda p: p * 2,
    "sum of two": lambda p: p + p,
    "product": lambda p: torch.ones(3, p.shape[0]) @ p,
    "copied by hand": lambda p: torch.randn_like(p),
    "a leaf that requires grad": lambda p: torch.randn_like(p).requires_grad_(),
    "a view of an activation": lambda p: (p * 2).t(),
    "a cast of an activation": lambda p: cast(p * 2),
}


@pytest.mark.parametrize("guise", GUISES)
def test_guises_of_a_trained_parameter(guise: str) -> None:
    parameter = Small(frozen=False).table
    assert is_parameter(GUISES[guise](parameter), NONE)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_are_none(kind: str) -> None:
    for frozen in (False, True):
        model = Small(frozen=frozen)
        activation = ACTIVATIONS[kind](model.table)
        assert not is_parameter(activation, NONE)
        assert not is_parameter(activation, FrozenShapes(model.linear))


@pytest.mark.parametrize("guise", ["itself", "transposed", "row", "view of a view", "chunk"])
def test_guises_of_a_frozen_parameter_without_autocast(guise: str) -> None:
    assert is_parameter(GUISES[guise](Small(frozen=True).table), NONE)


def test_casts_of_frozen_weights_under_autocast() -> None:
    model = Small(frozen=True)
    shapes = FrozenShapes(model)
    assert is_parameter(cast(model.linear.weight).t(), shapes)
    assert is_parameter(cast(model.table), shapes)
    assert not is_parameter(model.linear.weight.clone().t(), shapes), "not a cast: same dtype"
    assert not is_parameter(cast(model.linear.weight).t(), NONE), "autocast is off"
    trained = Small(frozen=False)
    with torch.no_grad():
        assert not is_parameter(cast(trained.table), FrozenShapes(trained)), "none is frozen"


def test_activations_with_the_shape_of_a_frozen_weight() -> None:
    # Four rows of eight: exactly the weight of Linear(8, 4), which it is not.
    model = Small(frozen=True)
    shapes = FrozenShapes(model)
    activation = torch.randn(2, 2, 8, dtype=torch.bfloat16)
    assert not is_parameter(activation.view(4, 8), shapes)
    assert not is_parameter(activation.flatten(0, 1), shapes)
    assert not is_parameter(torch.randn(4, 8, dtype=torch.bfloat16), shapes)
    assert not is_parameter(torch.ones(4, 8, dtype=torch.int64), shapes)


@contextlib.contextmanager
def kept_by(offloader: Offloader) -> Iterator[list[torch.Tensor]]:
    """Yield the list in which the kept tensors that are unpacked end up."""
    kept: list[torch.Tensor] = []
    unpack = offloader.engine.unpack

    def tell(handle: Any) -> torch.Tensor:
        if isinstance(handle, KeptTensor):
            kept.append(handle.tensor)
        return unpack(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloader.engine, "unpack", tell)
        yield kept


def test_a_parameter_is_kept_as_the_same_object() -> None:
    # ZeRO-3 exchanges what a Parameter holds: a detached copy would pin what it had gathered.
    model = Stack(lambda layer, x: x * layer.weight, lambda layer, x: x * layer.weight)
    with attach(model, EVERY_LAYER) as offloader, kept_by(offloader) as kept:
        model(torch.randn(4, 4, requires_grad=True)).sum().backward()
    assert len(kept) == 2
    assert all(found is layer.weight for found, layer in zip(kept, model.layers[::-1], strict=True))


def test_buffers_stay_and_are_not_counted() -> None:
    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ layer.weight) * layer.scale[:, :4]

    model = Stack(function, function)
    for layer in model.layers:
        layer.register_buffer("scale", torch.randn(4, 8))
    with attach(model, EVERY_LAYER) as offloader, kept_by(offloader) as kept:
        model(torch.randn(4, 4)).sum().backward()
        metrics = offloader.metrics()
    scales = {layer.scale.untyped_storage()._cdata for layer in model.layers}
    assert scales <= {tensor.untyped_storage()._cdata for tensor in kept}
    assert metrics["held_bytes"] == 0
    # Per layer the relu's result, and the input of the first.
    assert metrics["would_hold_bytes"] == 3 * 4 * 4 * 4 + 4 * 4 * 4


def test_a_copy_of_a_parameter_for_each_row_is_an_activation() -> None:
    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        rows = layer.weight.expand(3, 4, 4).contiguous()
        return x + rows.sin().sum(0)

    model = Stack(function, function)
    with attach(model, EVERY_LAYER) as offloader:
        model(torch.randn(4, 4)).sum().backward()
        metrics = offloader.metrics()
    assert metrics["offloaded_bytes"] == metrics["would_hold_bytes"] == 2 * 3 * 4 * 4 * 4


def test_quantised_weights_and_other_parameter_subclasses_stay_as_they_are() -> None:
    class Packed(Parameter):
        """What bitsandbytes calls Params4bit."""

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        return x * layer.packed

    model = Stack(function)
    model.layers[0].packed = Packed(torch.randn(4, 4))
    with attach(model, EVERY_LAYER) as offloader, kept_by(offloader) as kept:
        model(torch.randn(4, 4, requires_grad=True)).sum().backward()
    assert any(tensor is model.layers[0].packed for tensor in kept)


@pytest.mark.parametrize("min_bytes", [0, 10**6], ids=["moved", "kept"])
def test_a_parameter_is_known_behind_an_alias_of_it(min_bytes: int) -> None:
    # ZeRO-3 exchanges the data of parameters between forward and backward.
    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight.detach() + x @ layer.weight

    model = Stack(function)
    plain = copy.deepcopy(model)
    gradients = []
    config = dataclasses.replace(EVERY_LAYER, min_bytes=min_bytes)
    for each in (plain, model):
        with attach(each, config) if each is model else contextlib.nullcontext():
            x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
            loss = each(x).square().sum()
            for parameter in each.parameters():
                parameter.data = parameter.data * 2
            loss.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.thorough
@pytest.mark.parametrize("change", [torch.clone, cast], ids=["clone", "cast"])
def test_an_output_over_a_copy_of_a_parameter_makes_no_cycle(change: Any) -> None:
    marks: list[weakref.ref[Any]] = []

    class Mark:
        pass

    class SavesItsOutput(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            output = x.view(x.shape)
            ctx.save_for_backward(output)
            ctx.mark = Mark()
            marks.append(weakref.ref(ctx.mark))
            return output

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        weight = SavesItsOutput.apply(change(layer.weight))
        return (x.to(weight.dtype) @ weight).to(x.dtype)

    model = Stack(function)
    with attach(model, EVERY_LAYER):
        for _ in range(3):
            model(torch.randn(4, 4))  # thrown away without backward
        model(torch.randn(4, 4)).sum().backward()
    assert len(marks) == 4
    gc.collect()
    assert not [mark for mark in marks if mark() is not None]
