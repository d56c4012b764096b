"""Compiled layers on a fake copy: what they save there is what they save in the run."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.recording.model_copy import CopiedStep, CopyError
from hf_pyao.auto.recording.seen_forward import seen_forward
from hf_pyao.auto.recording.step_recording import record_fake_step
from hf_pyao.engine.runtime.observer import Observer
from tests.helpers import assert_same_tensors, gradients_of, tiny_batch, tiny_model

BACKEND = "aot_eager_decomp_partition"
"""Inductor's decompositions and partitioner, without its code generation."""
NUM_LAYERS = 6

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Saved(Observer):
    """Notes the slots of each forward."""

    def __init__(self) -> None:
        self.slots: list[tuple[int, str, int]] = []

    def on_slot(self, slot: Any, stays: Any, decision: Any) -> None:
        self.slots.append((slot.layer_index, slot.name, slot.nbytes))


def model_with(how: str = "layers", backend: Any = BACKEND) -> Any:
    torch._dynamo.reset()
    model: Any = tiny_model("llama", num_hidden_layers=NUM_LAYERS)
    layers = model.model.layers
    for number, layer in enumerate(list(layers)):
        if how == "regional":
            layers[number] = torch.compile(layer, backend=backend)
        elif how == "forwards":
            layer.forward = torch.compile(layer.forward, backend=backend)
        elif how == "parts":
            layer.mlp.compile(backend=backend)
        else:
            layer.compile(backend=backend)
    return model


def batch() -> dict[str, Tensor]:
    return {name: torch.cat([value] * 6) for name, value in tiny_batch(0).items()}


def step(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(**batch(), use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


def within(budget: float) -> Any:
    """Set torch's own memory budget, which is read when code is compiled."""
    return torch._functorch.config.patch(activation_memory_budget=budget)


def predicted(model: Any) -> list[tuple[int, str, int]]:
    copied = CopiedStep(model, seen_forward((), {**batch(), "use_cache": False}))
    program = record_fake_step(copied)[0].whole()
    return [(slot.layer, slot.name, slot.nbytes) for slot in program.slots]


def saved(model: Any) -> tuple[list[tuple[int, str, int]], dict[str, Tensor]]:
    seen = Saved()
    with attach(model, PyAOConfig(policy="all", min_bytes=0, host_memory_gib=0.1)) as offloader:
        offloader.engine.observe_too(seen)
        found = step(model)
    return seen.slots, found


@pytest.mark.parametrize(
    ("how", "budget"), [("layers", 0.25), ("layers", 1.0), ("regional", 0.5), ("forwards", 1.0)]
)
@pytest.mark.sampled(every=2)
def test_a_copy_saves_what_the_run_saves(how: str, budget: float) -> None:
    """Name by name, byte by byte, also within a memory budget that the user gives torch."""
    with within(budget):
        expected = step(model_with(how))
        model = model_with(how)
        found = predicted(model)
        slots, tensors = saved(model)
    assert found == slots
    assert_same_tensors(tensors, expected, f"{how}, {budget}")
    if budget < 1:
        whole, _ = saved(model_with(how))
        assert sum(each[2] for each in slots) < sum(each[2] for each in whole)


@pytest.mark.thorough
def test_layers_beyond_the_recompile_limit_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """With a cache there is code for each layer by itself, and torch makes eight of a kind."""
    caplog.set_level(logging.INFO)
    model = model_with()
    config = PyAOConfig(device_memory_gib=5e-4, min_bytes=0, profile_steps=2, host_memory_gib=0.1)
    with attach(model, config) as offloader:
        for _ in range(4):
            model(**batch()).loss.backward()
        assert offloader.metrics()["offloaded_bytes"] > 0
    (line,) = (each for each in caplog.messages if each.startswith("policy 'auto'"))
    assert "use_cache=False" in line


@pytest.mark.thorough
@pytest.mark.parametrize("budget", [1.0, 0.25])
def test_a_copy_saves_what_code_of_inductor_saves(budget: float) -> None:
    with within(budget):
        model = model_with(backend="inductor")
        assert predicted(model) == saved(model)[0]


def odd_backend(graph: Any, inputs: Any) -> Any:
    return graph


@pytest.mark.parametrize(
    ("how", "backend", "why"),
    [("layers", odd_backend, "odd_backend"), ("parts", BACKEND, "a part of a layer is compiled")],
)
def test_what_cannot_be_foreseen_is_not_recorded(how: str, backend: Any, why: str) -> None:
    with pytest.raises(CopyError, match=why):
        predicted(model_with(how, backend))
