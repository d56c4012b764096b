"""What a recipe reads beside saved tensors may change: the gradients stay right, or it is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_pyao import ModuleMap, attach, register_module_map
from hf_pyao.errors import SavedTensorModifiedError
from tests.helpers import EVERY_LAYER, assert_same_tensors, gradients_of

POINTWISE = replace(EVERY_LAYER, recompute_modules=("pointwise",))
SIZES = {"scalar": 1, "small": 16, "constant": 128, "large": 1024}
"""Copied, copied, held as it is, known as a buffer."""


class ConstantsLayer(nn.Module):
    def __init__(self, size: int, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.register_buffer("state", torch.linspace(0.1, 1.0, size))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


class ConstantsModel(nn.Module):
    def __init__(self, size: int, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(ConstantsLayer(size, function) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


register_module_map("ConstantsModel", ModuleMap(layers=("layers",)))


def read(layer: ConstantsLayer, x: torch.Tensor) -> torch.Tensor:
    hidden = nn.functional.gelu(layer.linear(x))
    return ((hidden - layer.state).exp() + 1).log()


def changed_in_between(layer: ConstantsLayer, x: torch.Tensor) -> torch.Tensor:
    y = read(layer, x)
    layer.state.mul_(0.5)
    return y + read(layer, x)


def changed_as_a_view(layer: ConstantsLayer, x: torch.Tensor) -> torch.Tensor:
    y = read(layer, x)
    layer.state[:1].add_(1)
    return y * read(layer, x)


def changed_by_batch_norm(layer: ConstantsLayer, x: torch.Tensor) -> torch.Tensor:
    y = read(layer, x)
    y = nn.functional.batch_norm(y, layer.state, torch.ones_like(layer.state), training=True)
    return y.tanh() + read(layer, x)


def changed_under_inference_mode(layer: ConstantsLayer, x: torch.Tensor) -> torch.Tensor:
    y = read(layer, x)
    with torch.inference_mode():
        layer.state.mul_(0.5)
    return y


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "function",
    [
        changed_by_batch_norm,
        changed_under_inference_mode,
        read,
        changed_in_between,
        changed_as_a_view,
    ],
    ids=lambda function: function.__name__,
)
def test_a_buffer_that_the_layer_changes(size: str, function: Callable[..., torch.Tensor]) -> None:
    model = ConstantsModel(SIZES[size], function)
    plain = copy.deepcopy(model)
    x = torch.randn(4, SIZES[size])
    with attach(model, POINTWISE) as offloader:
        for each in (plain, model):
            for _ in range(2):
                each(x).sum().backward()
        assert offloader.totals()["recomputed_bytes"] > 0
    assert_same_tensors(gradients_of(model), gradients_of(plain), size)
    for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs), "replay changed a buffer"


@pytest.mark.parametrize("size", SIZES)
def test_a_buffer_that_is_changed_between_forward_and_backward(size: str) -> None:
    model = ConstantsModel(SIZES[size], read)
    plain = copy.deepcopy(model)
    x = torch.randn(4, SIZES[size])
    plain(x).sum().backward()
    with attach(model, POINTWISE):
        loss = model(x).sum()
        for layer in model.layers:
            layer.state.add_(1)
        if size in ("scalar", "small"):
            loss.backward()
            assert_same_tensors(gradients_of(model), gradients_of(plain), size)
        else:
            with pytest.raises(SavedTensorModifiedError, match="a buffer of shape"):
                loss.backward()


class LargestOf(torch.autograd.Function):
    """Writes its result with a kernel that torch's dispatcher does not see."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        largest = torch.empty(1)
        largest.numpy()[:] = float(x.detach().max())
        return largest

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> None:
        return None


def filled_in_a_function(layer: ConstantsLayer, x: torch.Tensor) -> torch.Tensor:
    hidden = nn.functional.gelu(layer.linear(x))
    return ((hidden - LargestOf.apply(x)).exp() + 1).log()


def filled_in_the_layer(layer: ConstantsLayer, x: torch.Tensor) -> torch.Tensor:
    hidden = nn.functional.gelu(layer.linear(x))
    largest = torch.empty(1)
    largest.numpy()[:] = float(x.detach().max())
    return ((hidden - largest).exp() + 1).log()


def chosen_by_an_opaque_operation(layer: ConstantsLayer, x: torch.Tensor) -> torch.Tensor:
    hidden = nn.functional.gelu(layer.linear(x))
    largest = hidden.sort(dim=0).values[-1:].contiguous()
    return ((hidden - largest).exp() + 1).log()


@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize(
    "function", [filled_in_a_function, filled_in_the_layer, chosen_by_an_opaque_operation]
)
def test_a_small_tensor_whose_writer_is_not_seen(
    function: Callable[..., torch.Tensor], size: int
) -> None:
    model = ConstantsModel(size, function)
    plain = copy.deepcopy(model)
    x = torch.randn(64, size)
    with attach(model, replace(POINTWISE, verify_recompute="off")) as offloader:
        for each in (plain, model):
            torch.full((1,), 7.5)  # what memory without content may hold
            each(x).sum().backward()
        assert offloader.metrics()["recomputed_bytes"] > 0
    assert_same_tensors(gradients_of(model), gradients_of(plain), function.__name__)


def test_sparse_operations_in_a_traced_layer() -> None:
    def sparse(layer: ConstantsLayer, x: torch.Tensor) -> torch.Tensor:
        hidden = layer.linear(x).tanh()
        return (hidden.to_sparse() * 2).to_dense().tanh() * layer.state

    model = ConstantsModel(16, sparse)
    plain = copy.deepcopy(model)
    x = torch.randn(4, 16)
    with attach(model, POINTWISE):
        for each in (plain, model):
            each(x).tanh().sum().backward()
    assert_same_tensors(gradients_of(model), gradients_of(plain), "sparse")
