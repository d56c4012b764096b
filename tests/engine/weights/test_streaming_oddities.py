"""Streamed weights in layers and loops that do what transformers models do not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao.errors import ConflictError, SavedTensorModifiedError
from tests.engine.weights.test_streaming import loss_of, ring_of, streamed
from tests.helpers import Stack, gradients_of
from tests.helpers.adapters import tiny_lora

Function = Callable[[Any, torch.Tensor], torch.Tensor]
Edit = Callable[[Stack], None]


def stack(function: Function, dtype: torch.dtype = torch.float32) -> Stack:
    """Return four layers with a frozen weight and a trained scale each."""

    def scaled(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(function(layer, x)) * layer.scale

    model = Stack(*[scaled] * 4)
    for layer in model.layers:
        if dtype.is_complex:
            layer.weight = nn.Parameter(torch.randn(4, 4, dtype=dtype) / 2)
        layer.weight.requires_grad_(False)
        layer.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))
    return model.train()


def step(model: Stack, seed: int = 0) -> dict[str, torch.Tensor]:
    model.zero_grad()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    loss = model(x).square().sum()
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    differing = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not differing


def check(function: Function, edit: Edit | None = None, dtype: torch.dtype = torch.float32) -> None:
    """Three steps with streamed weights, *edit* between them, against the same steps without."""
    model, expected = stack(function, dtype), stack(function, dtype)
    if dtype.is_complex:
        expected.load_state_dict(model.state_dict())
    with streamed(model, 0):
        for seed in range(3):
            assert_same(step(model, seed), step(expected, seed))
            if edit is not None:
                edit(model)
                edit(expected)
    for found, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(found, other)


def product(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight


def by_conjugate(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return (x.to(torch.complex64) @ layer.weight.conj()).real


def by_imaginary(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight.conj().imag


@pytest.mark.parametrize("function", [by_conjugate, by_imaginary])
@pytest.mark.sampled(every=1)
def test_conjugate_views(function: Function) -> None:
    check(function, dtype=torch.complex64)


def test_linear_layers_that_are_layers_themselves() -> None:
    class Linear(nn.Linear):
        pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(4, 4)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)).bfloat16()
            self.layers.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    model, expected = Model(), Model()
    with streamed(model, 0, layers=("layers.*",)) as offloader:
        for _ in range(2):
            results = []
            for each in (model, expected):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = each(torch.ones(2, 4)).float().sum()
                each.zero_grad()
                loss.backward()
                results.append((loss.detach(), each.first.weight.grad))
            assert all(map(torch.equal, *results))
        assert ring_of(offloader).num_uploads > 0


def test_writes_through_data_into_a_transposed_weight() -> None:
    def transposed() -> Stack:
        model = stack(product)
        for layer in model.layers:
            layer.weight = nn.Parameter(layer.weight.detach().clone().t(), requires_grad=False)
        return model

    model, expected = transposed(), transposed()
    with streamed(model, 0):
        references = [layer.weight for layer in model.layers]
        for seed in range(3):
            assert_same(step(model, seed), step(expected, seed))
            for weight, layer in zip(references, expected.layers, strict=True):
                weight.data.mul_(0.75)
                layer.weight.data.mul_(0.75)


def test_what_recurrent_cells_hold_stays() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(4, 4, batch_first=True)
            self.out = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))
            self.cell.requires_grad_(False)
            self.out.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.cell(x)[0]) * self.scale

    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(4)])
    with streamed(model, 0, layers=("0", "1", "2", "3")) as offloader:
        for _ in range(2):
            model(torch.ones(2, 3, 4)).sum().backward()
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 3, 4))
            model.train()
        assert ring_of(offloader).counts.num_left == 0
        assert offloader.weights is not None
        assert offloader.weights.left_bytes["held by their module"] > 0


def test_a_sparse_parameter_stays() -> None:
    model = stack(product)
    for layer in model.layers:
        sparse = torch.eye(4).to_sparse()
        layer.table = nn.Parameter(sparse, requires_grad=False)
    with streamed(model, 0) as offloader:
        step(model)
        assert ring_of(offloader).num_uploads > 0


# ---- weights that change -----------------------------------------------------------------------


def assign(model: Stack) -> None:
    for layer in model.layers:
        layer.weight.data = layer.weight.detach() * 0.75


def assign_by_parameter(model: Stack) -> None:
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.detach().t().contiguous()


def exchange_data(model: Stack) -> None:
    first, last = model.layers[0].weight, model.layers[-1].weight
    first.data, last.data = last.data, first.data


def load(model: Stack) -> None:
    model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})


@pytest.mark.parametrize("edit", [assign, assign_by_parameter, exchange_data, load])
@pytest.mark.sampled(every=1)
def test_edits_between_steps(edit: Edit) -> None:
    check(product, edit)


def test_data_of_another_shape_is_refused() -> None:
    model = stack(product)
    with streamed(model, 0):
        step(model)
        model.layers[2].weight.data = torch.ones(4, 4, dtype=torch.float64)
        with pytest.raises(ConflictError, match=r"layers\.2\.weight' was given data of dtype"):
            step(model)


def test_a_layer_that_writes_through_data_is_refused() -> None:
    def shrinks(layer: Any, x: torch.Tensor) -> torch.Tensor:
        layer.weight.data.mul_(0.5)
        return x @ layer.weight

    def assigns(layer: Any, x: torch.Tensor) -> torch.Tensor:
        layer.weight.data = layer.weight.data * 0.5
        return x @ layer.weight

    for function in (shrinks, assigns):
        model = stack(function)
        before = [layer.weight.detach().clone() for layer in model.layers]
        with pytest.raises(ConflictError, match="in place as it runs"), streamed(model, 0):
            for _ in range(2):
                step(model)
        assert all(torch.equal(a, b.weight) for a, b in zip(before, model.layers, strict=True))


def test_peft_that_unmerges_in_forward_is_refused() -> None:
    model: Any = tiny_lora("llama", num_hidden_layers=3)
    with streamed(model, 0):
        loss_of(model).backward()
        model.merge_adapter()
        with pytest.raises(ConflictError, match="unmerge_adapter"), model.disable_adapter():
            loss_of(model)


def test_functional_call_inside_of_a_layer_gives_the_parameter_back() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.inner.requires_grad_(False)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            doubled = {"weight": self.inner.weight * 2}
            return torch.func.functional_call(self.inner, doubled, x) * self.scale + self.inner(x)

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[Layer() for _ in range(3)])

    model, expected = build(), build()
    with streamed(model, 0, layers=("0", "1", "2")):
        for _ in range(3):
            losses = [each(torch.ones(2, 4)).sum() for each in (model, expected)]
            assert torch.equal(*losses)
            for loss in losses:
                loss.backward()
    assert all(type(layer.inner._parameters["weight"]) is nn.Parameter for layer in model)
    for found, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert found.grad is other.grad is None or torch.equal(found.grad, other.grad)


def test_a_change_between_forward_and_backward_is_an_error_as_without() -> None:
    for at in range(4):
        model = stack(product)
        with streamed(model, 0):
            step(model)
            loss = model(torch.ones(3, 4, requires_grad=True)).sum()
            with torch.no_grad():
                model.layers[at].weight.mul_(2)
            with pytest.raises(SavedTensorModifiedError, match=f"layers.{at}.weight"):
                loss.backward()


@pytest.mark.parametrize("at", range(4))
@pytest.mark.sampled(every=1)
def test_data_that_are_edited_between_forward_and_backward_are_read_as_without(at: int) -> None:
    """By a reference that is older than the pass: no version tells of it."""
    model, expected = stack(product), stack(product)
    with streamed(model, 0):
        for each in (model, expected):
            weights = [layer._parameters["weight"] for layer in each.layers]
            step(each)
            each.zero_grad()
            loss = each(torch.ones(3, 4)).square().sum()
            weights[at].data.mul_(2)
            loss.backward()
        assert_same(gradients_of(model), gradients_of(expected))


def test_a_change_in_a_hook_of_the_layer_is_seen() -> None:
    def hooked() -> Stack:
        model = stack(product)
        for layer in model.layers:
            following = layer.weight
            layer.register_forward_pre_hook(
                lambda module, args, weight=following: torch.no_grad()(weight.mul_)(0.9)
            )
        return model

    model, expected = hooked(), hooked()
    with streamed(model, 0):
        for seed in range(3):
            assert_same(step(model, seed), step(expected, seed))


def test_a_weight_that_is_thawed_in_mid_pass_is_refused() -> None:
    model = stack(product)
    weight = model.layers[2].weight
    handle = model.layers[0].register_forward_pre_hook(lambda *_: weight.requires_grad_())
    with streamed(model, 0):
        with pytest.raises(ConflictError, match=r"layers\.2\.weight' requires gradients"):
            step(model)
        handle.remove()
        weight.requires_grad_(False)
        assert_same(step(model), step(stack(product)))


def test_a_thread_that_reads_weights_does_not_disturb_second_runs() -> None:
    """A read from outside makes a block come again; what is saved is told as before."""
    outside = threading.Event()

    def reads(layer: Any, x: torch.Tensor) -> torch.Tensor:
        y = x @ layer.weight
        thread = threading.Thread(target=lambda: layer.weight.sum())
        thread.start()
        thread.join()
        outside.set()
        return y @ layer.weight.abs()

    model, expected = stack(reads), stack(reads)
    with streamed(model, 0, checkpoint_every=1):
        for seed in range(2):
            assert_same(step(model, seed), step(expected, seed))
    assert outside.is_set()
