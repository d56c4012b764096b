"""Layers and scripts that read weights at odd moments: they find the right bytes, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao.engine.weights.device_block import DeviceBlock
from hf_pyao.engine.weights.places import Place
from hf_pyao.errors import ConflictError
from tests.engine.weights.test_streaming import ring_of, streamed
from tests.helpers import gradients_of

WIDTH = 6
LAYERS = ("0", "1", "2", "3", "4")


class Layer(nn.Module):
    """Two frozen products and a trained shift; *between* runs between the products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9, bias=False), nn.Linear(9, WIDTH, bias=False)
        self.requires_grad_(False)
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.between: Callable[[Layer, torch.Tensor], None] = lambda layer, hidden: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sigmoid(self.up(x))
        self.between(self, hidden)
        return x + self.down(hidden) + self.shift


def build() -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(*[Layer() for _ in LAYERS]).train()


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    loss = model(x).pow(2).sum()
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


Prepare = Callable[[nn.Sequential, list[torch.Tensor]], object]


def sums_in_hooks(model: nn.Sequential, seen: list[torch.Tensor]) -> None:
    """Hooks of the layer, and of a module in it, read weights in forward and in backward."""

    def read(module: Any, *_: Any) -> None:
        seen.append(next(module.parameters()).detach().sum().clone())

    for layer in model:
        layer.register_forward_pre_hook(read)
        layer.register_forward_hook(read)
        layer.down.register_forward_hook(read)
        layer.up.register_full_backward_hook(read)


def sums_between_layers(model: nn.Sequential, seen: list[torch.Tensor]) -> None:
    """A callback looks at the weights of all layers, whichever has just run."""

    def read(*_: Any) -> None:
        seen.extend(layer.up.weight.sum() for layer in model)

    for layer in model:
        layer.register_forward_hook(read)


def states_in_hooks(model: nn.Sequential, seen: list[torch.Tensor]) -> None:
    """In the middle of a layer the model's state is taken, and kept."""

    def save(*_: Any) -> None:
        state = model.state_dict()
        seen.extend(state[f"{name}.down.weight"] for name in LAYERS)

    model[2].up.register_forward_hook(save)


def averages_in_hooks(model: nn.Sequential, seen: list[torch.Tensor]) -> None:
    """A running average of all weights is kept in the middle of a layer."""
    mean = [parameter.detach().clone() for parameter in model.parameters()]
    seen.extend(mean)

    def follow(*_: Any) -> None:
        with torch.no_grad():
            for each, parameter in zip(mean, model.parameters(), strict=True):
                each.lerp_(parameter, 0.25)

    model[3].up.register_forward_hook(follow)


def gradients_inside(model: nn.Sequential, seen: list[torch.Tensor]) -> None:
    """A layer asks for a gradient, through itself and through layers before it."""

    def ask(layer: Layer, hidden: torch.Tensor) -> None:
        shifts = [each.shift for each in list(model)[:2]]
        seen.extend(torch.autograd.grad(hidden.sum(), shifts, retain_graph=True))

    model[3].between = ask


def a_forward_inside(model: nn.Sequential, seen: list[torch.Tensor]) -> None:
    """A layer runs other layers meanwhile."""

    def run(layer: Layer, hidden: torch.Tensor) -> None:
        with torch.no_grad():
            seen.append(model[4](model[0](hidden[:, :WIDTH])))

    model[2].between = run


@pytest.mark.parametrize(
    "prepare",
    [
        sums_in_hooks,
        sums_between_layers,
        states_in_hooks,
        averages_in_hooks,
        gradients_inside,
        a_forward_inside,
    ],
)
@pytest.mark.sampled(every=1)
def test_what_is_read_at_odd_moments_is_right(prepare: Prepare) -> None:
    results = []
    for is_streamed in (False, True):
        model, seen = build(), list[torch.Tensor]()
        prepare(model, seen)
        if is_streamed:
            with streamed(model, layers=LAYERS) as offloader:
                steps = [step(model) for _ in range(2)]
                assert ring_of(offloader).num_uploads > 5
        else:
            steps = [step(model) for _ in range(2)]
        results.append((steps, [each.clone() for each in seen]))
    (expected, read), (found, read_here) = results
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal(ours, theirs)
    assert len(read) == len(read_here) > 0
    assert all(map(torch.equal, read, read_here))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, StopIteration])
def test_an_exception_in_mid_layer_leaves_the_parameters(error: type[BaseException]) -> None:
    model = build()
    before = [(p, p.detach().clone()) for p in model.parameters()]

    def fail(layer: Layer, hidden: torch.Tensor) -> None:
        raise error

    with streamed(model, layers=LAYERS):
        model[2].between = fail
        with pytest.raises((error, RuntimeError)):
            step(model)
        for (known, bits), found in zip(before, model.parameters(), strict=True):
            assert known is found
            assert torch.equal(bits, found)
        model[2].between = lambda layer, hidden: None
        assert_equal(step(model), step(build()))


def test_mutant_that_leaves_what_is_on_the_device_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Place, "take_out", lambda place: None)
    with pytest.raises(AssertionError):
        test_an_exception_in_mid_layer_leaves_the_parameters(RuntimeError)


def test_mutant_that_does_not_fill_a_block_again(monkeypatch: pytest.MonkeyPatch) -> None:
    own, filled = DeviceBlock.fill, list[DeviceBlock]()

    def fill(block: DeviceBlock) -> None:
        own(block)
        if block.block.index == 1:
            if block in filled:
                block.storage.fill_(255)  # fresh memory may hold the old bytes
            filled.append(block)
            monkeypatch.setattr(block.block, "pieces", lambda: iter(()))

    monkeypatch.setattr(DeviceBlock, "fill", fill)
    model = build()
    with streamed(model, layers=LAYERS), pytest.raises(AssertionError):
        assert_equal(step(model), step(build()))


def test_a_layer_as_a_generator_of_its_parts() -> None:
    """The weights are there until the layer's forward returns, and are the parameters then."""

    class Parts(Layer):
        def parts(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            for module in (self.up, self.down):
                x = torch.tanh(module(x))
                yield x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            *_, last = self.parts(x)
            return last + self.shift

    def stack() -> nn.Sequential:
        torch.manual_seed(4)
        return nn.Sequential(*[Parts() for _ in LAYERS])

    model = stack()
    with streamed(model, layers=LAYERS):
        assert_equal(step(model), step(stack()))
        assert all(type(layer.up.weight) is nn.Parameter for layer in model)


@pytest.mark.parametrize("where", ["attribute", "list", "buffer"])
def test_a_view_that_a_layer_keeps_is_refused_by_name(where: str) -> None:
    def keep(layer: Any, hidden: torch.Tensor) -> None:
        view = layer.down.weight.detach()[:, 1:]
        if where == "buffer":
            layer.register_buffer("kept", view)
        else:
            layer.kept = view if where == "attribute" else [view]

    model = build()
    model[1].between = keep
    with streamed(model, layers=LAYERS), pytest.raises(ConflictError, match=r"'1' keeps.*kept"):
        step(model)


def test_a_module_that_two_layers_share_stays() -> None:
    def shared() -> nn.Sequential:
        model = build()
        model[3].up = model[0].up
        return model

    model = shared()
    with streamed(model, layers=LAYERS) as offloader:
        for _ in range(2):
            assert_equal(step(model), step(shared()))
        assert offloader.weights is not None
        assert offloader.weights.left_bytes["tied with others"] > 0


def test_a_float32_base_under_autocast_is_refused_by_name() -> None:
    model = build()
    with streamed(model, layers=LAYERS), torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ConflictError, match=r"'0.up.weight' is torch.float32 and streamed"):
            step(model)
        with torch.no_grad():
            assert torch.equal(model(torch.ones(1, WIDTH)), build()(torch.ones(1, WIDTH)))
