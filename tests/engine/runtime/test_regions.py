"""Regions of one storage, saved one after the other and filled in between, as autograd allows.

Chunks of ``unsafe_chunk`` have version counters of their own (recurrent cells use it), and kernels
that autograd never hears of fill one slice of a workspace after another.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import ModuleMap, PyAOConfig, attach, register_module_map
from hf_pyao.engine.codecs import Codec
from hf_pyao.errors import SavedTensorModifiedError
from tests.helpers import (
    EVERY_LAYER,
    FunctionLayer,
    RecordingTransport,
    Stack,
    assert_same_tensors,
    gradients_of,
    linear_relu,
)
from tests.helpers.simulation.transport import SimulatedTransport

Step = Callable[[FunctionLayer, torch.Tensor, torch.Tensor], torch.Tensor]

SIZE = 16


class Filled(torch.autograd.Function):
    """sigmoid(x), which a kernel writes to *region*: no version tells."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: torch.Tensor) -> torch.Tensor:
        region.numpy()[...] = x.detach().sigmoid().numpy()
        ctx.save_for_backward(region)
        return region.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (y,) = ctx.saved_tensors
        return gradient * y * (1 - y), None


class Times(torch.autograd.Function):
    """x * region, where only *region* is saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(region)
        return x * region

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (region,) = ctx.saved_tensors
        return gradient * region, None


# ---- steps of a layer ----------------------------------------------------------------------------


def chunked(dim: int, names: tuple[str, str]) -> Step:
    def step(layer: FunctionLayer, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        both = torch.cat([a, b], dim) + 0.0
        first, second = both.unsafe_chunk(2, dim)
        first = getattr(first, names[0])()
        second = getattr(second, names[1])()
        return first * second

    return step


def split_in_three(layer: FunctionLayer, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    parts = (torch.cat([a, b, a], -1) + 0.0).unsafe_split(a.shape[-1], -1)
    return parts[0].sigmoid_() * parts[1].tanh_() + parts[2].exp() * parts[1]


def lstm_cell(layer: FunctionLayer, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    weight = layer.weight.repeat(4, 1)
    hidden, cell = torch.lstm_cell(a, (b, a.tanh()), weight, weight.flip(0))
    return hidden + cell


def gru_cell(layer: FunctionLayer, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    weight = layer.weight.repeat(3, 1)
    return torch.gru_cell(a, b, weight, weight.flip(0))


def rnn_cell(layer: FunctionLayer, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.rnn_tanh_cell(a, b, layer.weight, layer.weight.flip(0))


def workspace(dim: int) -> Step:
    def step(layer: FunctionLayer, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        sizes = list(a.shape)
        sizes.insert(dim, 3)
        room = torch.zeros(sizes)
        first = Filled.apply(a, room.select(dim, 0))
        second = Filled.apply(b, room.select(dim, 1))
        return first * Filled.apply(second - first, room.select(dim, 2)) + second

    return step


def workspace_of_all_layers(layer: FunctionLayer, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Each call of each layer fills the next row of a workspace that they share."""
    layer.rooms[1] += 1
    return Filled.apply(a, layer.rooms[0][layer.rooms[1]]) + b


def written_behind_the_back(dim: int) -> Step:
    def step(layer: FunctionLayer, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        sizes = list(a.shape)
        sizes.insert(dim, 2)
        room = torch.ones(sizes)
        room.data.select(dim, 0).copy_(a.detach().sin())
        first = Times.apply(b, room.select(dim, 0))
        room.data.select(dim, 1).copy_(b.detach().cos())
        return first + Times.apply(a, room.select(dim, 1))

    return step


STEPS: tuple[Step, ...] = (
    chunked(-1, ("sigmoid_", "tanh_")),
    chunked(0, ("tanh_", "relu_")),
    chunked(-1, ("sigmoid", "tanh_")),
    chunked(0, ("exp", "sigmoid")),
    split_in_three,
    lstm_cell,
    gru_cell,
    rnn_cell,
    workspace(0),
    workspace(1),
    workspace(2),
    workspace_of_all_layers,
    written_behind_the_back(0),
    written_behind_the_back(1),
    written_behind_the_back(2),
    lambda layer, a, b: (a @ layer.weight).chunk(2, -1)[1].repeat(1, 2) * b,
    lambda layer, a, b: torch.cat(list((a @ layer.weight).split(SIZE // 4, -1)[::-1]), -1).tanh(),
    lambda layer, a, b: a * b,
    lambda layer, a, b: a.t().contiguous().t() * b,
    lambda layer, a, b: (a @ layer.weight).tanh(),
)

MAX_CALLS = 64
"""Rows of the workspace that all layers share."""


def random_layer(seed: int) -> Callable[[FunctionLayer, torch.Tensor], torch.Tensor]:
    """Return a layer function that runs some of the steps on earlier results."""
    chooser = random.Random(seed)
    plan = [
        (chooser.choice(STEPS), chooser.randrange(10**6), chooser.randrange(10**6))
        for _ in range(chooser.randint(2, 7))
    ]

    def run(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        results = [x * 1.0, x @ layer.weight]
        for step, first, second in plan:
            a, b = results[-1 - first % 2], results[second % len(results)]
            results.append(torch.tanh(step(layer, a, b)))
        return results[-1] + results[-2]

    return run


def stack_of(*functions: Callable[..., Any]) -> Stack:
    return Stack(*functions, size=SIZE)


def gradients(model: Stack, seed: int) -> dict[str, torch.Tensor]:
    """Run two micro-batches, each with a workspace of its own."""
    model.zero_grad()
    x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(seed))
    for _ in range(2):
        rooms = [torch.zeros(MAX_CALLS, 4, SIZE), -1]
        for layer in model.layers:
            layer.rooms = rooms
        model(x).square().sum().backward()
    return gradients_of(model)


CONFIGS = {
    "offloaded": EVERY_LAYER,
    "in a window": replace(EVERY_LAYER, window=256),
    "some kept": replace(EVERY_LAYER, min_bytes=600, keep_last_layers=1, window=2**20),
    "pointwise recomputed": replace(EVERY_LAYER, window=256, recompute_modules=("pointwise",)),
    "pointwise recomputed, in a wide window": replace(
        EVERY_LAYER, window=2**20, recompute_modules=("pointwise",)
    ),
    "all recomputed": replace(EVERY_LAYER, window=64, recompute_modules=("*", ".")),
}


def check_programs(config: PyAOConfig, seeds: range) -> None:
    offloaded_bytes = 0.0
    for seed in seeds:
        model = stack_of(*(random_layer(seed + 10**5 * number) for number in range(3)))
        expected = gradients(copy.deepcopy(model), seed)
        with attach(model, config, transport=SimulatedTransport(seed)) as offloader:
            found = gradients(model, seed)
            offloaded_bytes += offloader.totals()["offloaded_bytes"]
        assert_same_tensors(found, expected, f"seed {seed}")
        assert offloader.host_pool.settle() == 0, f"seed {seed}"
    assert offloaded_bytes > 0


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.sampled(every=1000)
def test_random_regions_give_the_same_bits(config: PyAOConfig) -> None:
    check_programs(config, range(20))


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_3000_random_programs_give_the_same_bits(config: PyAOConfig, part: int) -> None:
    check_programs(config, range(100 + 150 * part, 100 + 150 * (part + 1)))


# ---- each by itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_each_step_gives_the_same_bits(step: Step, config: PyAOConfig) -> None:
    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        return step(layer, x @ layer.weight, x.sin())

    model = stack_of(function, function, linear_relu)
    expected = gradients(copy.deepcopy(model), 0)
    with attach(model, config, transport=SimulatedTransport(3)):
        assert_same_tensors(gradients(model, 0), expected, "gradients")


CELLS: dict[str, Callable[[], nn.Module]] = {
    "LSTMCell": lambda: nn.LSTMCell(SIZE, SIZE),
    "GRUCell": lambda: nn.GRUCell(SIZE, SIZE),
    "RNNCell": lambda: nn.RNNCell(SIZE, SIZE),
    "LSTM": lambda: nn.LSTM(SIZE, SIZE, num_layers=2, bidirectional=True),
    "GRU": lambda: nn.GRU(SIZE, SIZE, num_layers=2, dropout=0.3),
    "RNN": lambda: nn.RNN(SIZE, SIZE),
}


class Cells(nn.Module):
    """Two layers that each run a recurrent module."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(make() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            result = layer(x)
            while isinstance(result, tuple):
                result = result[0]
            x = x + result[..., :SIZE]
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", CELLS)
def test_recurrent_modules(kind: str, dtype: torch.dtype) -> None:
    register_module_map("Cells", ModuleMap(layers=("layers",)))
    model = Cells(CELLS[kind]).to(dtype).train()
    shape = (5, SIZE) if kind.endswith("Cell") else (3, 5, SIZE)
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    plain = copy.deepcopy(model)
    with attach(model, EVERY_LAYER, transport=SimulatedTransport(0)) as offloader:
        for each in (plain, model):
            torch.manual_seed(1)
            each(x).square().sum().backward()
        assert offloader.metrics()["offloaded_bytes"] > 0
    assert_same_tensors(gradients_of(model), gradients_of(plain), kind)


# ---- what moves ----------------------------------------------------------------------------------


def halves(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    """The two halves of a projection, each saved by a node of its own, as gated MLPs do."""
    gate, up = torch.cat([x @ layer.weight, x @ layer.weight.t()], -1).chunk(2, -1)
    return torch.sigmoid(gate).sin() * up + gate.cos()


def test_a_copy_that_was_put_off_begins_when_the_layer_ends() -> None:
    transport = RecordingTransport()
    seen: list[int] = []

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        y = halves(layer, x)
        seen.append(max(len(data) for _, data in transport.sources))
        return y

    model = stack_of(function)
    with attach(model, EVERY_LAYER, transport=transport):
        loss = model(torch.randn(4, SIZE)).sum()
        seen.append(max(len(data) for _, data in transport.sources))
        loss.backward()
    assert seen == [4 * SIZE * 4, 2 * 4 * SIZE * 4]


@pytest.mark.parametrize("host_memory_gib", [None, 0])
def test_a_region_may_change_while_the_copy_of_another_is_on_its_way(
    host_memory_gib: float | None,
) -> None:
    """Where layers are traced, the copy of all regions is queued as the first one changes."""

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.cat([x @ layer.weight, x], -1).unsafe_chunk(2, -1)
        gate.sigmoid_()
        y = gate * x
        return up.tanh_() * y

    model = stack_of(function, function)
    expected = gradients(copy.deepcopy(model), 0)
    config = replace(
        EVERY_LAYER,
        window=2**20,
        recompute_modules=("pointwise",),
        host_memory_gib=host_memory_gib,
    )
    for seed in range(6):
        with attach(model, config, transport=SimulatedTransport(seed)) as offloader:
            assert_same_tensors(gradients(model, 0), expected, f"seed {seed}")
            assert (offloader.metrics()["offloaded_bytes"] > 0) == (host_memory_gib is None)


def test_interleaved_columns_of_a_workspace_that_layers_share() -> None:
    room = torch.zeros(4, 3, SIZE)

    def fills(column: int) -> Callable[[FunctionLayer, torch.Tensor], torch.Tensor]:
        return lambda layer, x: Filled.apply(x @ layer.weight, room[:, column])

    model = stack_of(fills(0), fills(1), fills(2))
    expected = gradients(copy.deepcopy(model), 0)
    room.zero_()
    with attach(model, EVERY_LAYER) as offloader:
        assert_same_tensors(gradients(model, 0), expected, "gradients")
        assert offloader.metrics()["offloaded_bytes"] > 0


def test_a_region_that_changes_after_it_was_saved_is_an_error() -> None:
    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.cat([x @ layer.weight, x], -1).unsafe_chunk(2, -1)
        y = torch.sigmoid(gate) * up.sin()
        up.mul_(2)
        return y

    model = stack_of(function)
    with attach(model, EVERY_LAYER), pytest.raises(SavedTensorModifiedError):
        model(torch.randn(4, SIZE)).sum().backward()


def test_gradients_inside_of_a_layer_read_what_was_put_off() -> None:
    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.cat([x @ layer.weight, x], -1).chunk(2, -1)
        y = gate.sigmoid() * up
        (slope,) = torch.autograd.grad(y.sum(), layer.weight, retain_graph=True)
        return y * slope.sum()

    model = stack_of(function, function)
    expected = gradients(copy.deepcopy(model), 0)
    with attach(model, EVERY_LAYER, transport=SimulatedTransport(0)) as offloader:
        assert_same_tensors(gradients(model, 0), expected, "gradients")
        assert offloader.host_pool.settle() == 0


@pytest.mark.parametrize("codec", ["identity", "int8"])
def test_a_codec_encodes_what_was_put_off(codec: str | Codec) -> None:
    model = stack_of(halves, linear_relu)
    expected = gradients(copy.deepcopy(model), 0)
    config = replace(EVERY_LAYER, codec=codec)
    with attach(model, config, transport=SimulatedTransport(1)) as offloader:
        found = gradients(model, 0)
        metrics = offloader.metrics()
    ratio = metrics["link_bytes"] / (metrics["offloaded_bytes"] + metrics["reloaded_bytes"])
    assert ratio == 1.0 if codec == "identity" else ratio < 0.5
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0.1, atol=0.1)
