"""Casts that autocast makes of one tensor for several projections are moved once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import ModuleMap, attach, register_module_map
from tests.helpers import (
    EVERYTHING,
    RecordingTransport,
    assert_same_tensors,
    gradients_of,
    tiny_batch,
    tiny_model,
)
from tests.helpers.simulation.transport import SimulatedTransport

BATCH = tiny_batch()
HIDDEN_BYTES = 2 * 8 * 32 * 2
"""Hidden states of the tiny models in bfloat16."""


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("architecture", "casts_per_layer"),
    [("opt", 2), ("gpt2", 0), ("llama", 3), ("qwen2", 3), ("mistral", 3)],
)
def test_each_cast_is_moved_once(architecture: str, casts_per_layer: int) -> None:
    model = tiny_model(architecture)
    plain = copy.deepcopy(model)
    transport = RecordingTransport()
    with attach(model, EVERYTHING, transport=transport) as offloader:
        for each in (plain, model):
            with autocast():
                loss = each(**BATCH, use_cache=False).loss
            loss.backward()
        metrics = offloader.metrics()
    assert_same_tensors(gradients_of(model), gradients_of(plain), architecture)
    num_layers = len(offloader.layer_names) - EVERYTHING.keep_last_layers
    assert metrics["duplicate_bytes"] == num_layers * casts_per_layer * HIDDEN_BYTES
    assert metrics["would_hold_bytes"] == (
        metrics["offloaded_bytes"] + metrics["held_bytes"] + metrics["duplicate_bytes"]
    )
    moved = [src.numpy().tobytes() for _, src in transport.sources if src.numel() >= HIDDEN_BYTES]
    assert len(set(moved)) == len(moved), "equal bytes were moved twice"


class Projections(nn.Module):
    """One layer: a norm, two projections of what it makes, and something done in between."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        q = self.q(hidden)
        hidden = self.between(hidden)
        return x + (q * self.k(hidden)).float()


class ProjectionsModel(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Projections(between) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


register_module_map("ProjectionsModel", ModuleMap(layers=("layers",)))


def doubled_unseen(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.mul_(2)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


BETWEEN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "nothing": (lambda x: x, 2),
    "a view": (lambda x: x.view(4, 2, 32).view(8, 32), 0),
    "changed in place": (doubled, 0),
    "changed in place, unseen by autograd": (doubled_unseen, 0),
    "another tensor": (lambda x: x + 1, 0),
    "detached": (lambda x: x.detach(), 0),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_only_casts_of_one_tensor_at_one_version_are_equal(name: str) -> None:
    between, num_equal = BETWEEN[name]
    model = ProjectionsModel(between).train()
    plain = copy.deepcopy(model)
    x = torch.randn(8, 32)
    for seed in range(4):
        model.zero_grad()
        plain.zero_grad()
        with attach(model, EVERYTHING, transport=SimulatedTransport(seed)) as offloader:
            for each in (plain, model):
                with autocast():
                    loss = each(x).square().mean()
                loss.backward()
            metrics = offloader.metrics()
            assert offloader.host_pool.settle() == 0
        assert_same_tensors(gradients_of(model), gradients_of(plain), name)
        assert metrics["duplicate_bytes"] == num_equal * 8 * 32 * 2


def test_a_cast_that_others_made_and_changed_is_another_value() -> None:
    def cast_and_double(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        cast = args[0].to(torch.bfloat16)
        with torch.no_grad():
            cast.mul_(2)
        return (cast,)

    model = ProjectionsModel(BETWEEN["nothing"][0]).train()
    plain = copy.deepcopy(model)
    x = torch.randn(8, 32)
    with attach(model, EVERYTHING) as offloader:
        for each in (plain, model):
            for layer in each.layers:
                layer.k.register_forward_pre_hook(cast_and_double)
            with autocast():
                loss = each(x).square().mean()
            loss.backward()
        assert offloader.metrics()["duplicate_bytes"] == 0
    assert_same_tensors(gradients_of(model), gradients_of(plain), "changed by a hook")
