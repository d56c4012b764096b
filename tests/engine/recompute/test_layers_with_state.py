"""Layers that hold what real layers hold: which run again, which run once, which are named.

See [Note: Guards] in ``engine.rerun.guard`` and [Note: State of modules] in ``module_state``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_pyao import attach
from hf_pyao.errors import RecomputationError
from tests.engine.recompute.test_segments import lifecycle_of
from tests.helpers import EVERY_LAYER, Stack, assert_same_tensors, linear_relu

SIZE, NUM_STEPS = 4, 6
CHECKED = EVERY_LAYER.with_settings(checkpoint_every=1, verify_recompute="always")
CALLS: list[int] = []
Forward = Callable[[Any, Tensor], Tensor]

# ---- buffers ---------------------------------------------------------------------------------------


def batch_norm(layer: Any, x: Tensor) -> Tensor:
    return torch.tanh(layer.norm(x @ layer.weight))


def average_in_place(layer: Any, x: Tensor) -> Tensor:
    y = torch.tanh(x @ layer.weight - layer.mean)
    layer.mean.lerp_(x.detach().mean(0), 0.1)
    return y


def average_anew(layer: Any, x: Tensor) -> Tensor:
    y = torch.tanh(x @ layer.weight - layer.mean)
    layer.mean = 0.9 * layer.mean + 0.1 * x.detach().mean(0)
    return y


def spectral_norm(layer: Any, x: Tensor) -> Tensor:
    return torch.tanh(layer.spectral(x))


def step_in_buffer(layer: Any, x: Tensor) -> Tensor:
    layer.step += 1
    return torch.tanh(x @ layer.weight * layer.step.clamp(max=3))


def router_bias(layer: Any, x: Tensor) -> Tensor:
    load = torch.bincount((x @ layer.weight + layer.mean).argmax(-1), minlength=SIZE)
    layer.mean += 0.1 * torch.sign(load.float().mean() - load)
    return torch.tanh((x @ layer.weight) * (1 + layer.mean))


def codebook(layer: Any, x: Tensor) -> Tensor:
    nearest = torch.cdist(x.detach(), layer.codes).argmin(-1)
    y = torch.tanh(x @ layer.weight + layer.codes[nearest])
    layer.codes.index_add_(0, nearest, 0.01 * (x.detach() - layer.codes[nearest]))
    return y


def buffer_registered_late(layer: Any, x: Tensor) -> Tensor:
    if not hasattr(layer, "late"):
        layer.register_buffer("late", x.detach().mean(0))
    return torch.tanh(x @ layer.weight + layer.late)


def large_buffer(layer: Any, x: Tensor) -> Tensor:
    layer.large += x.detach().mean()
    return torch.tanh(x @ layer.weight + layer.large[:1])


# ---- attributes ------------------------------------------------------------------------------------


def warm_up(layer: Any, x: Tensor) -> Tensor:
    layer.count += 1
    return torch.tanh(x @ layer.weight * min(1.0, layer.count / 4))


def counts_only(layer: Any, x: Tensor) -> Tensor:
    layer.count += 1
    return torch.tanh(x @ layer.weight)


def hidden_state(layer: Any, x: Tensor) -> Tensor:
    y = torch.tanh(x @ layer.weight + layer.hidden)
    layer.hidden = y.detach()
    return y


def last_keys(layer: Any, x: Tensor) -> Tensor:
    keys = (*layer.keys[-1:], (x @ layer.weight).detach())
    layer.keys = keys
    return torch.tanh(F.scaled_dot_product_attention(x, torch.cat(keys), torch.cat(keys)))


def own_generator(layer: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ layer.weight + torch.rand(SIZE, generator=layer.generator))


def own_branches(layer: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ layer.weight) if layer.numpy.random() < 0.5 else torch.sin(x)


def table_at_first_use(layer: Any, x: Tensor) -> Tensor:
    if layer.table is None:
        layer.table = torch.arange(1.0, SIZE + 1).cos()
    return torch.tanh(x @ layer.weight * layer.table)


def module_at_first_use(layer: Any, x: Tensor) -> Tensor:
    if not hasattr(layer, "late_norm"):
        layer.late_norm = nn.BatchNorm1d(SIZE)
    return torch.tanh(layer.late_norm(x @ layer.weight))


def weight_norm(layer: Any, x: Tensor) -> Tensor:
    return torch.tanh(layer.parametrized(x))


# ---- what is put back, and what nobody sees --------------------------------------------------------


def dropout(layer: Any, x: Tensor) -> Tensor:
    return F.dropout(torch.tanh(x @ layer.weight), 0.3)


def depth_by_numpy(layer: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ layer.weight) * float(numpy.random.rand() < 0.6)


def trains_in_turn(layer: Any, x: Tensor) -> Tensor:
    layer.weight.requires_grad_(not layer.weight.requires_grad)
    return torch.tanh(x @ layer.weight) * x


def counts_in_global(layer: Any, x: Tensor) -> Tensor:
    CALLS.append(1)
    return torch.tanh(x @ layer.weight * len(CALLS))


def counts_in_closure(layer: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ layer.weight * layer.closure())


OUTCOMES: dict[str, tuple[Forward, ...]] = {
    "again": (
        *(batch_norm, average_anew, buffer_registered_late, weight_norm),
        *(dropout, depth_by_numpy, trains_in_turn),
    ),
    "again from the second call on": (
        *(average_in_place, step_in_buffer, router_bias, codebook, spectral_norm),
        *(table_at_first_use, module_at_first_use),
    ),
    "once": (
        *(large_buffer, warm_up, counts_only, hidden_state, last_keys, own_generator),
        own_branches,
    ),
    "named": (counts_in_global, counts_in_closure),
}
"""What random programs (``test_second_run_programs.py``) do is held there: bits. Here: which way."""


def furnished(forward: Forward) -> Stack:
    """Return three layers, of which the second one goes by *forward*."""
    CALLS.clear()
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    model = Stack(linear_relu, forward, linear_relu, size=SIZE)
    layer: Any = model.layers[1]
    layer.norm = nn.BatchNorm1d(SIZE)
    if forward is spectral_norm:
        layer.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(SIZE, SIZE))
    if forward is weight_norm:
        layer.parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(SIZE, SIZE))
    if forward is own_generator:
        layer.generator = torch.Generator().manual_seed(1)
    if forward is own_branches:
        layer.numpy = numpy.random.default_rng(1)
    if forward is large_buffer:
        layer.register_buffer("large", torch.zeros(2**18 + SIZE))
    for name, value in {
        "mean": torch.zeros(SIZE),
        "step": torch.zeros((), dtype=torch.int64),
        "codes": torch.randn(3, SIZE),
    }.items():
        layer.register_buffer(name, value)
    layer.count, layer.table, layer.keys, layer.hidden = 0, None, (), torch.zeros(SIZE)
    calls: list[int] = []
    layer.closure = lambda: calls.append(1) or len(calls)
    return model


def trained(model: Stack) -> dict[str, Tensor]:
    """Take some steps; return weights, buffers and what attributes count."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(4)
    for _ in range(NUM_STEPS):
        model(torch.randn(5, SIZE)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    layer: Any = model.layers[1]
    return {**model.state_dict(), "state": torch.tensor(layer.count)}


@pytest.mark.parametrize(
    ("forward", "outcome"),
    [(forward, outcome) for outcome, layers in OUTCOMES.items() for forward in layers],
)
@pytest.mark.sampled(every=3)
def test_layers_with_state(
    forward: Forward, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained(furnished(forward))
    model = furnished(forward)
    with attach(model, CHECKED) as offloader:
        if outcome == "named":
            with pytest.raises(RecomputationError, match=r"layers\.1"):
                trained(model)
            return
        found = trained(model)
        refused, num_runs = lifecycle_of(offloader).refused, lifecycle_of(offloader).filled.num_runs
        said = offloader.describe()
    assert_same_tensors(found, expected, forward.__name__)
    is_first_once = "does not run again this time" in caplog.text
    assert bool(refused) == (outcome == "once"), caplog.text
    assert ("(1 of them run once: " in said) == (outcome == "once"), said
    if outcome != "once":
        assert is_first_once == (outcome == "again from the second call on")
        assert num_runs == 3 * NUM_STEPS - is_first_once
