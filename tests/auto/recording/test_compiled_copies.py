"""Compiled layers on a fake copy: what they save there is what they save in the run, per budget."""

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
from hf_pyao.errors import ConflictError
from hf_pyao.levers import Levers
from hf_pyao.model.compiled.compiled_calls import compiled_calls
from hf_pyao.model.compiled.memory_budget import MemoryBudgets
from hf_pyao.model.map.module_map import find_layers
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


def predicted(model: Any, budget: Any) -> list[tuple[int, str, int]]:
    copied = CopiedStep(model, seen_forward((), {**batch(), "use_cache": False}))
    levers = Levers(activation_memory_budget=budget)
    program = record_fake_step(copied, levers=levers)[0].whole()
    return [(slot.layer, slot.name, slot.nbytes) for slot in program.slots]


def saved(model: Any, budget: Any) -> tuple[list[tuple[int, str, int]], dict[str, Tensor]]:
    seen = Saved()
    settings: dict[str, Any] = {"policy": "all", "min_bytes": 0, "host_memory_gib": 0.1}
    config = PyAOConfig(activation_memory_budget=budget, **settings)
    with attach(model, config) as offloader:
        offloader.engine.observe_too(seen)
        found = step(model)
    return seen.slots, found


CASES = [
    ("layers", 0.25),
    pytest.param("layers", "off", marks=pytest.mark.thorough),
    pytest.param("layers", 0.0, marks=pytest.mark.thorough),
    pytest.param("layers", (0.0, 0.25, 0.25, 1.0, 1.0, 1.0), marks=pytest.mark.thorough),
    pytest.param("regional", 0.5, marks=pytest.mark.thorough),
    pytest.param("regional", "off", marks=pytest.mark.thorough),
    pytest.param("forwards", 0.25, marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("how", "budget"), CASES)
def test_a_copy_saves_what_the_run_saves(how: str, budget: Any) -> None:
    """Name by name, byte by byte; and the bits are those of the same compiled code."""
    model = model_with(how)
    expected = step(model_with(how))
    found = predicted(model, budget)
    slots, tensors = saved(model, budget)
    assert found == slots
    assert_same_tensors(tensors, expected, f"{how}, {budget}")
    if budget != "off":
        whole, _ = saved(model_with(how), "off")
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
@pytest.mark.parametrize("budget", ["off", 0.25])
def test_a_copy_saves_what_code_of_inductor_saves(budget: Any) -> None:
    model = model_with(backend="inductor")
    found = predicted(model, budget)
    slots, _ = saved(model, budget)
    assert found == slots


@pytest.mark.parametrize("how", ["layers", "regional", "forwards"])
def test_budgets_are_taken_off_again(how: str) -> None:
    model = model_with(how)
    before = [call.code for call in compiled_calls(model)]
    assert len(before) == NUM_LAYERS
    budgets = MemoryBudgets(model, find_layers(model))
    budgets.set_budgets(0.5)
    changed = [call.code for call in compiled_calls(model)]
    assert not any(one is other for one, other in zip(before, changed, strict=True))
    budgets.uninstall()
    after = [call.code for call in compiled_calls(model)]
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_a_number_for_each_layer_needs_all_layers() -> None:
    model = model_with()
    with pytest.raises(ConflictError, match="6 layers"):
        attach(model, PyAOConfig(policy="all", activation_memory_budget=(0.5, 1.0)))
    assert not any(True for call in compiled_calls(model) if call.by.backend is None)


def odd_backend(graph: Any, inputs: Any) -> Any:
    return graph


@pytest.mark.parametrize(
    ("how", "backend", "why"),
    [("layers", odd_backend, "odd_backend"), ("parts", BACKEND, "a part of a layer is compiled")],
)
def test_what_cannot_be_foreseen_is_not_recorded(how: str, backend: Any, why: str) -> None:
    with pytest.raises(CopyError, match=why):
        predicted(model_with(how, backend), "off")


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["layers", "regional"])
def test_auto_takes_a_budget_where_nothing_else_fits(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan's bytes are those of the run that follows it, and its bits the compiled model's."""
    caplog.set_level(logging.INFO)
    expected = step(model_with(how))
    model = model_with(how)
    settings: dict[str, Any] = {"min_bytes": 0, "host_memory_gib": 0.1, "profile_steps": 2}
    config = PyAOConfig(
        device_memory_gib=0.0008, activation_memory_budget="auto", window=2**28, **settings
    )
    seen = Saved()
    with attach(model, config) as offloader:
        offloader.engine.observe_too(seen)
        for _ in range(4):
            seen.slots.clear()
            assert_same_tensors(step(model), expected, how)
        plan = offloader.plan
        assert plan is not None
        budget = offloader.levers.activation_memory_budget
        assert isinstance(budget, float | tuple)
        assert "memory budget" in plan.levers_reason
        assert len(plan.lever_settings) > 3
    assert [call.by.backend for call in compiled_calls(model)]
