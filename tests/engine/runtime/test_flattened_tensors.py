"""Saved tensors of subclasses leave the device by their inner tensors; bits as without hf_pyao."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nested import nested_tensor
from torch.testing._internal.two_tensor import TwoTensor

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.transfer.layout import Stays
from hf_pyao.errors import SavedTensorModifiedError
from tests.helpers import EVERY_LAYER, Stack, assert_same_tensors, gradients_of

SIZE = 64
NUM_BYTES = SIZE * SIZE * 4


class Scaled(Tensor):
    """Values of one byte, and a scale for each row: float8 as libraries of 8-bit training have it."""

    values: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Any:
        made = Tensor._make_wrapper_subclass(cls, values.shape, dtype=dtype, device=values.device)
        made.values, made.scale = values, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: Any, dtype: Any, size: Any, stride: Any) -> Any:
        return Scaled(inner["values"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].values, args[0].scale, args[0].dtype)
        raise NotImplementedError(func)

    def whole(self) -> Tensor:
        return self.values.to(self.dtype) * self.scale


class SavesFloat8(torch.autograd.Function):
    """Saves its input in 8 bits, once as a subclass and once as a plain tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = x.detach().abs().amax(1, keepdim=True) / 400
        values = (x.detach() / scale).to(torch.float8_e4m3fn)
        ctx.save_for_backward(Scaled(values, scale, x.dtype), values.clone())
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        scaled, values = ctx.saved_tensors
        assert type(scaled) is Scaled and values.dtype is torch.float8_e4m3fn
        return gradient * scaled.whole() + values.float()


class SavesTwo(torch.autograd.Function):
    """Saves a subclass whose inner tensors are of that subclass again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        plain = x.detach()
        inner = TwoTensor(plain + 1, plain * 3)
        ctx.save_for_backward(TwoTensor(inner, TwoTensor(plain.sin(), plain.cos())))
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (two,) = ctx.saved_tensors
        return gradient * two.a.a - two.a.b + two.b.a * two.b.b


def float8(layer: Any, x: Tensor) -> Tensor:
    return SavesFloat8.apply(x @ layer.weight)  # type: ignore[no-untyped-call,no-any-return]


def two(layer: Any, x: Tensor) -> Tensor:
    return SavesTwo.apply(x @ layer.weight)  # type: ignore[no-untyped-call,no-any-return]


LAYERS = {"float8": (float8, 2 * SIZE * SIZE + SIZE * 4), "two": (two, 4 * NUM_BYTES)}
"""By name: what a layer does, and the bytes that it saves in a subclass or in 8 bits."""

CONFIGS = {
    "all": EVERY_LAYER,
    "no window": replace(EVERY_LAYER, window=0),
    "int8 for others": replace(EVERY_LAYER, codec="int8", allow_lossy=True),
    "segments": replace(EVERY_LAYER, checkpoint_every=1),
    "recomputation": replace(EVERY_LAYER, recompute_modules=("*",)),
}


def gradients(function: Any, config: PyAOConfig | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model, x = Stack(function, function, function, size=SIZE), torch.randn(SIZE, SIZE)
    if config is None:
        model(x).sum().backward()
        return gradients_of(model), {}
    with attach(model, config) as offloader:
        model(x).sum().backward()
        return gradients_of(model), offloader.metrics()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sampled(every=1)
def test_gradients_are_those_without_us(name: str, config: str) -> None:
    function, num_bytes = LAYERS[name]
    torch.manual_seed(1)
    expected, _ = gradients(function, None)
    torch.manual_seed(1)
    found, metrics = gradients(function, CONFIGS[config])
    if config == "int8 for others":  # the parts of a subclass are exact: the codec has the others
        for each, value in expected.items():
            assert (found[each] - value).norm() < 0.05 * value.norm()
    else:
        assert_same_tensors(found, expected, name)
    if config in ("all", "no window"):
        assert metrics["offloaded_bytes"] >= 3 * num_bytes
        assert f"kept_bytes/{Stays.SUBCLASS}" not in metrics


class SavesGiven(torch.autograd.Function):
    """Saves another tensor than it computes with."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: Tensor) -> Tensor:
        ctx.save_for_backward(given)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (given,) = ctx.saved_tensors
        return gradient * given.a, None


@pytest.mark.parametrize("alive", [True, False])
def test_a_change_in_place_is_an_error_as_without_us(alive: bool) -> None:
    def function(layer: Any, x: Tensor) -> Tensor:
        given = TwoTensor(x.detach() + 0, x.detach() * 2)
        result = SavesGiven.apply(x @ layer.weight, given)  # type: ignore[no-untyped-call]
        alias = given if alive else given.detach()
        del given
        alias.add_(1)
        return result  # type: ignore[no-any-return]

    x = torch.randn(4, 4)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        Stack(function)(x).sum().backward()
    model = Stack(function)
    with attach(model, EVERY_LAYER), pytest.raises(SavedTensorModifiedError):
        model(x).sum().backward()


def test_one_that_was_changed_before_is_kept() -> None:
    def function(layer: Any, x: Tensor) -> Tensor:
        given = TwoTensor(x.detach() + 0, x.detach() * 2)
        first = SavesGiven.apply(x @ layer.weight, given * 1)  # type: ignore[no-untyped-call]
        given.mul_(2)
        return SavesGiven.apply(first, given)  # type: ignore[no-untyped-call,no-any-return]

    x = torch.randn(4, 4)
    plain, model = Stack(function), Stack(function)
    plain(x).sum().backward()
    with attach(model, EVERY_LAYER) as offloader:
        model(x).sum().backward()
        assert offloader.metrics()[f"kept_bytes/{Stays.SUBCLASS}"] > 0
    assert_same_tensors(gradients_of(model), gradients_of(plain), "gradients")


def test_nested_tensors_keep_their_ragged_size() -> None:
    def function(layer: Any, x: Tensor) -> Tensor:
        rows = nested_tensor([x[:1].detach(), x[1:].detach()], layout=torch.jagged)
        ragged = (rows @ layer.weight).sin() * 2
        return ragged.values()  # type: ignore[no-any-return]

    x = torch.randn(4, 4)
    plain, model = Stack(function), Stack(function)
    plain(x).sum().backward()
    with attach(model, EVERY_LAYER):
        model(x).sum().backward()
    assert_same_tensors(gradients_of(model), gradients_of(plain), "gradients")
