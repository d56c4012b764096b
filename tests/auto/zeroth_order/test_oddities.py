"""Models and loops that are built in other ways: bits are those of a plain MeZO all the same."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pyao import ZerothOrder, ZerothOrderSettings
from tests.auto.zeroth_order.test_step import EPSILON, RATE, Losses
from tests.helpers import tiny_batch, tiny_model
from tests.helpers.plain_mezo import PlainMeZO

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(9))
IDS = tiny_batch(0)


class Net(nn.Module):
    """Layers of one kind between two linear ones."""

    def __init__(self, layer: Callable[[], nn.Module], *, is_shared: bool = False) -> None:
        super().__init__()
        one = layer()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList([one] * 3 if is_shared else [layer() for _ in range(3)])
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros_like(x)
        for _ in range(3):
            hidden = self.cell(x, hidden)
        return hidden


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("zeroth order has no backward")


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(()))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Product.apply(x, self.weight)
        for scale in self.scales:
            x = x * scale
        return x


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def hooked() -> nn.Module:
    model = Net(Residual)
    model.layers[1].register_forward_hook(lambda module, args, output: output * 2)
    model.layers[0].linear.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return model


class Skips(nn.Module):
    """Adds, in its last call, what its first calls have pushed; as up and down paths do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.linear(x)) + x
        self.kept.append(x)
        if len(self.kept) == 3:
            x = x - 2 * self.kept[0] + self.kept[1].sin()
            self.kept.clear()
        return x


class Gated(Residual):
    gate = torch.ones(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gate


class SetsGates(Net):
    """Sets attributes of all layers before these run, and one of its own between them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            layer.gate = x.mean().cos()
        for layer in self.layers:
            x = layer(x)
            self.last_seen = x.abs().mean()
        return self.last(x * self.last_seen).square().mean()


def shares_a_list() -> nn.Module:
    model = Net(Skips)
    for layer in model.layers:
        layer.kept = model.layers[0].kept
    return model


class Halves(TorchFunctionMode):
    """Somebody's mode, which computes something else."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result / 2 if func is torch.tanh else result


class Doubles(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The same, below autograd."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.tanh.default else result


def one_random_layer(model: Any) -> torch.Tensor:
    number = int(torch.randint(3, (1,)))
    return model.last(model.layers[number](model.first(X))).square().mean()


class LossesOf(Losses):
    """What one function returns, as of one micro-batch."""

    def __init__(self, loss_fn: Callable[[Any], torch.Tensor]) -> None:
        super().__init__([IDS])
        self.loss_fn = loss_fn

    def __call__(self, model: nn.Module) -> list[torch.Tensor]:
        return [self.loss_fn(model)]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.Tensor]]] = {
    "one module as all layers": (lambda: Net(Residual, is_shared=True), lambda m: m(X)),
    "recurrent cells": (lambda: Net(Recurrent), lambda m: m(X)),
    "autograd functions and parameter lists": (lambda: Net(Custom), lambda m: m(X)),
    "parametrizations": (lambda: Net(Normed), lambda m: m(X)),
    "hooks of the user": (hooked, lambda m: m(X)),
    "one sample": (lambda: Net(Residual), lambda m: m(X[:1])),
    "layers left out at random": (lambda: Net(Residual), one_random_layer),
    "a part of the model alone": (
        lambda: tiny_model("llama"),
        lambda m: m.model(IDS["input_ids"]).last_hidden_state.square().mean(),
    ),
    "values that later layers read": (shares_a_list, lambda m: m(X)),
    "attributes that the model sets": (lambda: SetsGates(Gated), lambda m: m(X)),
    "two forwards in one loss": (
        lambda: tiny_model("llama"),
        lambda m: m(**IDS).loss + m(**IDS).loss,
    ),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_a_plain_run(name: str) -> None:
    make, loss_fn = CASES[name]
    torch.manual_seed(0)
    model = make().train()
    plain_model = copy.deepcopy(model)
    losses = LossesOf(loss_fn)
    plain = PlainMeZO(plain_model, EPSILON, seed=5)
    torch.manual_seed(3)
    expected = [plain.step(losses, RATE) for _ in range(4)]
    torch.manual_seed(3)
    layers = () if hasattr(model, "config") else ("layers.*",)
    settings = ZerothOrderSettings(epsilon=EPSILON, seed=5)
    with ZerothOrder(model, settings, layers=layers) as made:
        for gradient in expected:
            made.accumulate(model, loss_fn)
            assert made.end_step(RATE) == gradient
    for (key, p), q in zip(plain_model.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), key


@pytest.mark.parametrize("mode", [Halves, Doubles])
def test_modes_of_the_caller_are_on_in_both_passes(mode: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = Net(Residual)
    plain = PlainMeZO(copy.deepcopy(model), EPSILON, seed=5)
    losses = LossesOf(lambda m: m(X))
    settings = ZerothOrderSettings(epsilon=EPSILON, seed=5)
    with ZerothOrder(model, settings, layers=("layers.*",)) as made, mode():
        made.accumulate(model, lambda model: model(X))
        assert made.end_step(RATE) == plain.step(losses, RATE)


def test_inference_mode_of_the_caller_is_on_in_both_passes() -> None:
    model, seen = Net(Residual), []
    with ZerothOrder(model, layers=("layers.*",)) as made, torch.inference_mode():
        made.accumulate(model, lambda m: (seen.append(torch.is_inference_mode_enabled()), m(X))[1])
    assert seen == [True, True]


def test_weights_that_nothing_reads_are_updated_as_the_next_step_ends() -> None:
    torch.manual_seed(0)
    model = Net(Residual)
    model.add_module("tower", nn.Linear(8, 3))
    plain_model = copy.deepcopy(model)
    plain = PlainMeZO(plain_model, EPSILON, seed=5)
    losses = LossesOf(lambda m: m(X))
    with ZerothOrder(
        model, ZerothOrderSettings(epsilon=EPSILON, seed=5), layers=("layers.*",)
    ) as made:
        for number in range(5):
            plain.step(losses, RATE)
            made.accumulate(model, lambda model: model(X))
            made.end_step(RATE)
            behind = [each.name for each in made._trained.weights if each.num_applied < number]
            assert behind == []
    for (key, p), q in zip(plain_model.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), key


def test_copies_and_pickles_have_the_updated_weights() -> None:
    model = tiny_model("gpt2").eval()
    with ZerothOrder(model, ZerothOrderSettings(epsilon=EPSILON)) as made:
        made.accumulate(model, lambda model: model(**IDS).loss)
        made.end_step(0.1)
        twin, part = copy.deepcopy(model), copy.deepcopy(model.transformer.h[1])
        file = io.BytesIO()
        torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for each, right in ((twin, model), (loaded, model), (part, model.transformer.h[1])):
        assert each.state_dict().keys() == right.state_dict().keys()
        for (key, p), q in zip(right.named_parameters(), each.parameters(), strict=True):
            assert torch.equal(p, q), key


def test_weights_may_be_changed_and_the_model_copied_between_steps() -> None:
    model = tiny_model("llama").eval()
    plain_model = copy.deepcopy(model)
    plain = PlainMeZO(plain_model, EPSILON, seed=5)
    with ZerothOrder(model, ZerothOrderSettings(epsilon=EPSILON, seed=5)) as made:
        for number in range(3):
            plain.step(Losses([IDS]), RATE)
            made.accumulate(model, lambda model: model(**IDS).loss)
            made.end_step(RATE)
            if number == 1:
                made.flush()
                for each in (model, plain_model):
                    layers: Any = each.model.layers
                    weight = layers[0].mlp.up_proj.weight
                    weight.data = weight.data.clone() * 1.5
                    with torch.no_grad():
                        layers[1].mlp.up_proj.weight.mul_(0.5)
                    each.model.norm.weight.data.mul_(0.5)
        twin = copy.deepcopy(model)
    for (key, p), q in zip(plain_model.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), key
    assert all(type(module._parameters) is dict for module in twin.modules())


def test_statistics_of_batch_norm_see_the_pass_at_plus_epsilon_first() -> None:
    torch.manual_seed(0)
    model = Net(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))).train()
    expected = copy.deepcopy(model)
    plain = PlainMeZO(expected, EPSILON, seed=5)
    kept = {name: p.detach().clone() for name, p in expected.named_parameters()}
    with torch.no_grad():
        for sign in (1, -1):
            for name, p in expected.named_parameters():
                noise = plain.noise(name).view(p.shape)
                p.copy_(kept[name] + noise * (sign * EPSILON))
            expected(X)
    settings = ZerothOrderSettings(epsilon=EPSILON, seed=5)
    with ZerothOrder(model, settings, layers=("layers.*",)) as made:
        made.accumulate(model, lambda model: model(X))
    for (name, found), right in zip(model.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(found, right), name
    assert model.layers[0][1].num_batches_tracked == 2  # type: ignore[index,union-attr,operator]


def test_a_batch_without_samples_changes_nothing() -> None:
    model = Net(Residual)
    before = copy.deepcopy(model.state_dict())
    with ZerothOrder(model, layers=("layers.*",)) as made:
        made.accumulate(model, lambda model: model(X[:0]))
        made.end_step(RATE)
        assert made.num_skipped_steps == 1
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
