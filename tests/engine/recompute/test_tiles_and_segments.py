"""Tiles and segments together, on models that are none of transformers': what runs again in
backward finds everything as its forward did, whatever a script or a layer changes meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_pyao import ModuleMap, Offloader, PyAOConfig, attach, register_module_map
from hf_pyao.errors import ConflictError, RecomputationError, SavedTensorModifiedError
from hf_pyao.model.map import architectures
from tests.helpers import gradients_of

SIZE = 8
Gradients = dict[str, Tensor]

SETTINGS: dict[str, dict[str, Any]] = {
    "tiles": {"policy": "off", "mlp_tiles": 3},
    "segments": {"policy": "all", "checkpoint_every": 2, "save_attention": True},
    "nested": {"policy": "all", "mlp_tiles": 3, "checkpoint_every": 3, "checkpoint_nested": True},
    "both": {"policy": "all", "mlp_tiles": 3, "checkpoint_every": 1},
}


class MLP(nn.Module):
    """Goes up and down."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class PlainLayer(nn.Module):
    """Attention and an MLP; a test may give what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.qkv, self.o_proj = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        self.mlp = MLP()
        self.end: Callable[[Any, Tensor], Tensor] = lambda _, x: x

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 2, SIZE // 2)).unbind(-3)
        attention = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in heads))
        x = x + self.o_proj(attention.transpose(1, 2).flatten(-2))
        return self.end(self, x + self.mlp(x))


class PlainNet(nn.Module):
    """Such layers, one after the other."""

    def __init__(self, end: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(PlainLayer() for _ in range(3))
        if end is not None:
            for layer in self.layers:
                layer.end = end

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def _net_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "_registered_maps", {})
    roles = {"mlp_up": ("mlp.up_proj",), "mlp_down": ("mlp.down_proj",)}
    register_module_map("PlainNet", ModuleMap(layers=("layers",), roles=roles))


def attached(model: nn.Module, settings: str) -> Offloader:
    return attach(
        model,
        PyAOConfig(min_bytes=0, host_memory_gib=0.1, keep_last_layers=0, **SETTINGS[settings]),
    )


def input_of_net() -> Tensor:
    return torch.linspace(-1, 1, 2 * 5 * SIZE).view(2, 5, SIZE).requires_grad_()


def step(model: nn.Module, between: Callable[[], None] = lambda: None) -> Gradients:
    """Return the gradients of one step; *between* is called before backward."""
    model.zero_grad()
    x = input_of_net()
    loss = model(x).square().sum()
    between()
    loss.backward()
    return gradients_of(model) | {"input": x.grad}


def assert_same(found: Gradients, expected: Gradients, settings: str) -> None:
    """Compare; tiles add gradients of weights up in another order."""
    assert found.keys() == expected.keys()
    least = 1e-3 * max(tensor.norm() for tensor in expected.values())
    for name, tensor in expected.items():
        if settings == "segments":
            assert torch.equal(found[name], tensor), name
        else:
            assert (found[name] - tensor).norm() <= 1e-5 * max(tensor.norm(), least), name


# ---- what a script changes between forward and backward ------------------------------------------


def evaluate(model: nn.Module, offloader: Offloader | None) -> None:
    model.eval()


def freeze(model: nn.Module, offloader: Offloader | None) -> None:
    model.layers[1].requires_grad_(False)
    model.layers[2].mlp.up_proj.weight.requires_grad_(False)


def replace(model: nn.Module, offloader: Offloader | None) -> None:
    for layer in model.layers:
        layer.mlp.up_proj.weight = nn.Parameter(torch.zeros(2 * SIZE, SIZE))
        layer.norm.weight = nn.Parameter(torch.zeros(SIZE))


def detach(model: nn.Module, offloader: Offloader | None) -> None:
    if offloader is not None:
        offloader.detach()


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("change", [evaluate, freeze, replace, detach])
def test_changes_between_forward_and_backward(
    change: Callable[[nn.Module, Offloader | None], None], settings: str
) -> None:
    def branch(layer: PlainLayer, x: Tensor) -> Tensor:
        return torch.sin(x) * 2 if layer.training else torch.sin(x * 3)

    model = PlainNet(branch)
    plain = copy.deepcopy(model)
    expected = step(plain, lambda: change(plain, None))
    offloader = attached(model, settings)
    if change is detach and settings in ("nested", "both"):
        # Tiles go with the offloader: what runs again is not what ran. It is said, and not trained on.
        with pytest.raises(RecomputationError, match="computed something else"):
            step(model, lambda: change(model, offloader))
        return
    found = step(model, lambda: change(model, offloader))
    assert_same(found, expected, settings)
    after = [(m.training, list(vars(m))) for m in model.modules()]
    offloader.detach()
    if change is detach:
        assert [(m.training, list(vars(m))) for m in model.modules()] == after
    assert [m.training for m in model.modules()] == [m.training for m in plain.modules()]
    flags = [p.requires_grad for p in plain.parameters()]
    assert [p.requires_grad for p in model.parameters()] == flags


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", [nn.Parameter, lambda tensor: tensor * 1])
def test_weights_that_are_put_in_for_a_forward_alone(
    kind: Callable[[Tensor], Tensor], settings: str
) -> None:
    def run(model: nn.Module) -> Gradients:
        others = {n: (p * 1.5).detach().requires_grad_() for n, p in model.named_parameters()}
        used = {n: kind(tensor) for n, tensor in others.items()}
        wanted = used if kind is nn.Parameter else others
        out = torch.func.functional_call(model, used, (input_of_net(),)).square().sum()
        return dict(zip(wanted, torch.autograd.grad(out, list(wanted.values())), strict=True))

    model = PlainNet()
    expected = run(copy.deepcopy(model))
    with attached(model, settings):
        before = [id(p) for p in model.parameters()]
        assert_same(run(model), expected, settings)
        assert [id(p) for p in model.parameters()] == before


# ---- MLPs that are left alone --------------------------------------------------------------------


def test_mlps_that_draw_numbers_of_others() -> None:
    class DrawingMLP(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.from_numpy(np.random.rand(SIZE).astype("float32"))

    def run(model: nn.Module) -> Gradients:
        np.random.seed(1)
        return step(model)

    model = PlainNet()
    for layer in model.layers:
        layer.mlp = DrawingMLP()
    expected = run(copy.deepcopy(model))
    np.random.seed(2)
    drawn = np.random.rand()
    np.random.seed(2)
    with attached(model, "both") as offloader:
        assert np.random.rand() == drawn, "attaching drew numbers"
        assert offloader.mlp_tiles is not None
        assert_same(run(model), expected, "segments")
        assert "draws" in offloader.mlp_tiles.describe()
        assert offloader.mlp_tiles.num_tiled == 0


# ---- the rest --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own, in jvp
@pytest.mark.parametrize("settings", SETTINGS)
def test_transforms_of_torch_func(settings: str) -> None:
    def smooth(layer: PlainLayer, x: Tensor) -> Tensor:
        return torch.tanh(layer.mlp(layer.norm(x)))

    model = PlainNet()
    for layer in model.layers:
        layer.forward = smooth.__get__(layer)
    x = input_of_net().detach()
    weights = dict(model.named_parameters())

    def loss(weights: Any) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().sum()

    def run() -> tuple[Any, ...]:
        _, tangent = torch.func.jvp(model, (x,), (x,))
        return (
            torch.vmap(model)(torch.stack([x, x])),
            tangent,
            *torch.func.grad(loss)(weights).values(),
        )

    expected = run()
    with attached(model, settings):
        found = run()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_second_derivatives_are_refused_with_tiles() -> None:
    model = PlainNet()
    for layer in model.layers:
        layer.qkv.requires_grad_(False)
    with attached(model, "both"):
        x = input_of_net()
        with pytest.raises(ConflictError, match="create_graph=True"):
            torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_changes_in_place_of_what_a_layer_is_given(caplog: pytest.LogCaptureFixture) -> None:
    def adds(layer: PlainLayer, x: Tensor) -> Tensor:
        return x.add_(layer.mlp(x.clone()))

    model = PlainNet()
    for layer in model.layers:
        layer.forward = adds.__get__(layer)
    with attached(model, "segments"):
        model(input_of_net() * 1)
        assert "'layers.0' does not run again: it changes in place" in caplog.text
    model = PlainNet()
    with attached(model, "segments"):
        model.layers[0].forward = adds.__get__(model.layers[0])
        model.layers[0].requires_grad_(False)
        model.layers[0](torch.zeros(1, 2, SIZE))  # saves nothing
        hidden = input_of_net() * 1
        model.layers[1].forward = lambda x: torch.sin(model.layers[1].mlp(x.clone()))
        out = model.layers[1](hidden)
        hidden.add_(1)
        with pytest.raises(SavedTensorModifiedError, match=r"input of.*Clone the tensor"):
            out.sum().backward()
