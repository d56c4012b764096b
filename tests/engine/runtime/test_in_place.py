"""Changing a saved tensor in place raises, as it does without hooks, and says which one it was.

Saved-tensor hooks switch off autograd's own check: with plain hooks each of these would pass and
train on wrong gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.errors import PyAOError, SavedTensorModifiedError
from tests.helpers import EVERY_LAYER, EVERYTHING, FunctionLayer, Stack, linear_relu
from tests.helpers.simulation.late_transport import LateTransport

Function = Callable[[FunctionLayer, torch.Tensor], torch.Tensor]

CONFIGS = {
    "offloaded": EVERY_LAYER,
    "offloaded, window in bytes": replace(EVERY_LAYER, window=64),
    "kept in the last layer": replace(EVERYTHING, keep_last_layers=1),
    "kept as too small": replace(EVERY_LAYER, min_bytes=10**6),
    "kept for want of host memory": replace(EVERY_LAYER, host_memory_gib=0.0),
}


def changes_input(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    hidden = x.clone()
    product = hidden @ layer.weight
    hidden.add_(1)
    return product


def changes_result(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    result = torch.sigmoid(x @ layer.weight)
    with torch.no_grad():
        result.mul_(2)
    return result.clone()


def changes_base_of_view(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    hidden = x.clone().detach()
    product = hidden[:2] @ layer.weight
    hidden[3].zero_()
    return product


def changes_view_of_saved(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    hidden = x.clone().detach()
    product = hidden @ layer.weight
    hidden[1:2].mul_(3)
    return product


def changes_detached_alias(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    hidden = x.clone()
    product = hidden @ layer.weight
    hidden.detach().mul_(3)
    return product


def changes_what_was_saved_twice(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    hidden = x.clone()
    product = hidden @ layer.weight
    hidden.mul_(3)
    return product + hidden @ layer.weight


CHANGES: tuple[Function, ...] = (
    changes_input,
    changes_result,
    changes_base_of_view,
    changes_view_of_saved,
    changes_detached_alias,
    changes_what_was_saved_twice,
)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_inside_the_layer_raises(change: Function, config: PyAOConfig) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        Stack(linear_relu, change)(x).sum().backward()

    model = Stack(linear_relu, change)
    with attach(model, config) as offloader:
        loss = model(x).sum()
        with pytest.raises(SavedTensorModifiedError) as caught:
            loss.backward()
        message = str(caught.value)
        assert "modified by an inplace operation" in message
        assert "layer 'layers.1'" in message
        assert "slot ':" in message
        # Whoever catches autograd's error catches this one.
        assert isinstance(caught.value, RuntimeError)
        assert isinstance(caught.value, PyAOError)
        del loss, caught
        assert offloader.host_pool.settle() == 0


class Parts(nn.Module):
    """A layer's sub-modules, whose names the message gives."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(4, 4), nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.up(x))  # type: ignore[no-any-return]


def test_the_message_names_the_sub_module_that_saved_it() -> None:
    outputs = []

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        outputs.append(layer.part(x))
        return outputs[-1].clone()  # type: ignore[no-any-return]

    model = Stack(function, function)
    for layer in model.layers:
        layer.part = Parts()
    with attach(model, EVERY_LAYER):
        loss = model(torch.randn(4, 4)).sum()
        with torch.no_grad():
            outputs[0].add_(1)
        with pytest.raises(
            SavedTensorModifiedError, match=r"slot 'part\.act:0' of layer 'layers\.0'"
        ):
            loss.backward()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_change_after_the_forward_raises(config: PyAOConfig) -> None:
    # By now the copy has long left: the check must not depend on that.
    kept: list[torch.Tensor] = []

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        kept.append(x.clone())
        return kept[-1] @ layer.weight

    model = Stack(function, function)
    with attach(model, config):
        for index in (0, 1):
            kept.clear()
            loss = model(torch.randn(4, 4, requires_grad=True)).sum()
            with torch.no_grad():
                kept[index].fill_(7)
            with pytest.raises(SavedTensorModifiedError, match=f"layers.{index}"):
                loss.backward()


def test_a_changed_parameter_raises() -> None:
    model = Stack(linear_relu, linear_relu)
    with attach(model, EVERY_LAYER):
        x = torch.randn(4, 4, requires_grad=True)
        for index in (0, 1):
            loss = model(x).sum()
            with torch.no_grad():
                model.layers[index].weight.mul_(2)
            with pytest.raises(SavedTensorModifiedError, match=f"layers.{index}"):
                loss.backward()


def test_a_changed_buffer_raises() -> None:
    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        return x * layer.scale * layer.weight

    model = Stack(function)
    model.layers[0].register_buffer("scale", torch.ones(4, 4))
    with attach(model, EVERY_LAYER):
        loss = model(torch.randn(4, 4, requires_grad=True)).sum()
        model.layers[0].scale.add_(1)
        with pytest.raises(SavedTensorModifiedError):
            loss.backward()


def test_a_change_between_two_backwards_raises_at_the_second() -> None:
    kept: list[torch.Tensor] = []

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        kept.append(x.clone())
        return kept[-1] @ layer.weight

    for config in CONFIGS.values():
        kept.clear()
        model = Stack(function)
        with attach(model, config):
            loss = model(torch.randn(4, 4, requires_grad=True)).sum()
            loss.backward(retain_graph=True)
            with torch.no_grad():
                kept[0].add_(1)
            with pytest.raises(SavedTensorModifiedError):
                loss.backward()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_changes_that_autograd_allows_pass(config: PyAOConfig) -> None:
    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        hidden = x.clone()
        hidden += 1  # before it is saved
        product = hidden @ layer.weight
        product.relu_()  # saves its own result
        other = product + 1
        other.mul_(2)  # saves nothing of it
        whole = torch.zeros(8, 4)
        whole[:4] = other
        whole[4:] = other.sin()  # disjoint, and saved by no one
        return whole[:4] + whole[4:]

    model, x = Stack(function, function), torch.randn(4, 4)
    plain = copy.deepcopy(model)
    plain(x).sum().backward()
    with attach(model, config):
        model(x).sum().backward()
    for layer, expected in zip(model.layers, plain.layers, strict=True):
        assert torch.equal(layer.weight.grad, expected.weight.grad)


@pytest.mark.parametrize("recomputed", [(), ("pointwise",)])
def test_a_change_through_data_is_in_what_is_saved_next(recomputed: tuple[str, ...]) -> None:
    """No version tells of it. On a CPU it is in what was saved before, too, as without hooks."""

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ layer.weight
        before = hidden.square()
        (slope,) = torch.autograd.grad(before.sum(), hidden, retain_graph=True)
        hidden.data[1:].mul_(3)
        after = hidden.square() + hidden[1:].exp().sum()
        return after * slope.detach() + (0 if recomputed else before)

    model = Stack(function, linear_relu)
    grads = []
    for config in (None, replace(EVERY_LAYER, window=1, recompute_modules=recomputed)):
        x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        with nullcontext() if config is None else attach(model, config):
            model(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


class SavesAll(torch.autograd.Function):
    """Passes x through, and saves all the tensors that it gets."""

    @staticmethod
    def forward(ctx, x, *tensors):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        assert ctx.saved_tensors
        return (gradient, *(None for _ in ctx.saved_tensors))


ALIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the tensor": lambda x: x,
    "a view": lambda x: x.view(16),
    "a view of a view": lambda x: x.view(16)[:4],
    "detached": lambda x: x.detach(),
    "a view of it detached": lambda x: x.detach().view(16),
    "its data": lambda x: x.data,
    "a view of its data": lambda x: x.data.view(16),
}


@pytest.mark.parametrize("second", ALIASES)
@pytest.mark.parametrize("first", ALIASES)
def test_whichever_alias_is_changed_is_seen(first: str, second: str) -> None:
    # Some share a version counter, and some have one of their own.
    saved: list[torch.Tensor] = []

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ layer.weight
        saved[:] = [hidden, ALIASES[first](hidden), ALIASES[second](hidden)]
        return SavesAll.apply(x @ layer.weight, *saved[1:])  # type: ignore[no-any-return]

    model = Stack(function)
    with attach(model, EVERY_LAYER) as offloader:
        for changed in (1, 2):
            loss = model(torch.randn(4, 4)).sum()
            with torch.no_grad():
                saved[changed].add_(1)
            with pytest.raises(SavedTensorModifiedError):
                loss.backward()
        assert offloader.metrics()["offloaded_bytes"] > 0


def _base_gone(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    hidden = x * 1
    product = hidden.view(4, 4) * weight
    hidden = hidden.data
    alias = hidden.data
    other = alias @ weight
    alias.add_(1)
    return product + other


def _detached_base_gone(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    base = (x * 1).detach()
    product = base.view(4, 4) @ weight
    data = base.data
    del base
    alias = data.data
    other = alias.view(4, 4) @ weight
    alias.add_(1)
    return product + other


def _tensor_gone(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    hidden = (x * 1).detach()
    product = hidden @ weight
    hidden = hidden.data
    alias = hidden.view(4, 4)
    other = alias @ weight
    alias.add_(1)
    return product + other


@pytest.mark.parametrize("function", [_base_gone, _detached_base_gone, _tensor_gone])
def test_a_tensor_at_the_address_of_one_that_is_gone_is_watched(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    # The allocator hands a tensor's address out again; its version counter is another one.
    model = Stack(lambda layer, x: function(layer.weight, x))
    for _ in range(10):
        with attach(model, EVERY_LAYER):
            loss = model(torch.randn(4, 4, requires_grad=True)).sum()
            with pytest.raises(SavedTensorModifiedError):
                loss.backward()


class ChangesInBackward(torch.autograd.Function):
    """Squares, and doubles its saved input in place when it runs backward."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        x.mul_(2)
        return x * gradient


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("recompute", [(), ("pointwise",)], ids=["", "recomputed"])
def test_what_one_node_changes_in_backward_no_other_may_use(
    config: PyAOConfig, recompute: tuple[str, ...]
) -> None:
    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        hidden = x * 1.0
        product = hidden * layer.weight[0]
        return product + ChangesInBackward.apply(hidden)  # runs backward first

    model = Stack(function, function)
    x = torch.randn(4, 4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        copy.deepcopy(model)(x).sum().backward()
    with attach(model, replace(config, recompute_modules=recompute)) as offloader:
        with pytest.raises(SavedTensorModifiedError, match="modified by an inplace operation"):
            model(x).sum().backward()
        offloader.engine.end_forward()
        assert offloader.host_pool.settle() == 0


def test_what_was_read_in_place_is_watched_however_often_it_was_given() -> None:
    """It waits to leave when backward asks for it: three nodes get what one of them got first."""
    given: list[torch.Tensor] = []

    class ChangesWhatAnotherGot(ChangesInBackward):
        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            given.append(*ctx.saved_tensors)
            if len(given) == 2:
                given[0].mul_(2)
            return gradient * 2

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        hidden = x * 1.5
        product = hidden * layer.weight[0]
        for _ in range(2):  # these run backward first
            product = product + ChangesWhatAnotherGot.apply(hidden)
        return product

    model, x = Stack(function), torch.randn(5, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        copy.deepcopy(model)(x).sum().backward()
    given.clear()
    with attach(model, replace(EVERY_LAYER, window=2**20), transport=LateTransport()):
        with pytest.raises(SavedTensorModifiedError, match="modified by an inplace operation"):
            model(x).sum().backward()


def test_a_second_backward_does_not_use_it_either() -> None:
    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        return ChangesInBackward.apply(x @ layer.weight)  # type: ignore[no-any-return]

    model, x = Stack(function, function), torch.randn(4, 4)
    plain = copy.deepcopy(model)(x).sum()
    plain.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain.backward()
    with attach(model, EVERY_LAYER):
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(SavedTensorModifiedError, match="modified by an inplace operation"):
            loss.backward()
