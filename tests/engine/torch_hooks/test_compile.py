"""torch.compile and offloading together: hooks still fire, and gradients are those of compiled code.

Compiled code may bypass module hooks without a word. Each way to compile is attached both before
and after; backend ``aot_eager`` runs dynamo and the autograd tracer, but compiles no kernels.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import attach
from tests.helpers import (
    EVERY_LAYER,
    EVERYTHING,
    Stack,
    assert_same_tensors,
    gradients_of,
    linear_relu,
    tiny_batch,
    tiny_model,
)

# Dynamo says so where it cannot see into a builtin of torch's own.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_layers(model: Any) -> Any:
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


def compile_forwards(model: Any) -> Any:
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager")
    return model


def wrap_layers(model: Any) -> Any:
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend="aot_eager")
    return model


def compile_model(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def compile_in_place(model: Any) -> Any:
    model.compile(backend="aot_eager")
    return model


WAYS: tuple[Callable[[Any], Any], ...] = (
    compile_layers,
    compile_forwards,
    wrap_layers,
    compile_model,
    compile_in_place,
)


def build() -> Stack:
    return Stack(linear_relu, linear_relu, linear_relu)


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    x = torch.linspace(-1, 1, 16).view(4, 4)
    model(x).square().sum().backward()
    return {name.replace("_orig_mod.", ""): g for name, g in gradients_of(model).items()}


@pytest.mark.thorough
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("compiles_first", [True, False], ids=["compiled first", "attached first"])
@pytest.mark.parametrize("compile_", WAYS, ids=lambda way: way.__name__)
def test_compiled_code_packs(compile_: Callable[[Any], Any], compiles_first: bool) -> None:
    if compile_ is compile_layers or not compiles_first:
        model: Any = build()
    else:
        model = build()
    expected = step(compile_(build()))
    if compiles_first:
        model = compile_(model)
        step(model)  # compiled before any hook was there
        offloader = attach(model, EVERY_LAYER)
    else:
        offloader = attach(model, EVERY_LAYER)
        model = compile_(model)
    if compile_ is wrap_layers and not compiles_first:
        # The hooks are on what the wrappers call.
        assert offloader.is_attached
    for _ in range(2):
        assert_same_tensors(step(model), expected, compile_.__name__)
        stats = offloader.engine.figures.last
        assert stats is not None
        assert stats.num_packs > 0
        assert stats.offloaded_bytes > 0
        assert stats.reloaded_bytes == stats.offloaded_bytes
        assert offloader.host_pool.settle() == 0
    assert offloader.engine.num_layer_calls == 6
    offloader.detach()
    assert_same_tensors(step(model), expected, "detached")
    assert offloader.engine.num_layer_calls == 6


@pytest.mark.thorough
@pytest.mark.parametrize("compile_", [compile_layers, compile_model], ids=lambda way: way.__name__)
@pytest.mark.sampled(every=1000)
def test_after_another_instance_of_the_class_ran_compiled(
    compile_: Callable[[Any], Any],
) -> None:
    # Dynamo reuses the code of one instance for another without looking at its hooks.
    other, model = compile_(build()), build()
    expected = step(other)
    with attach(model, EVERY_LAYER) as offloader:
        compiled = compile_(model)
        assert_same_tensors(step(compiled), expected, "")
        assert offloader.engine.num_packs > 0
        assert_same_tensors(step(other), expected, "the other one")
        packs = offloader.engine.num_packs
        step(other)
        assert offloader.engine.num_packs == packs


@pytest.mark.parametrize("can_ask", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_only_code_of_the_model_is_compiled_again(
    can_ask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    critic = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), backend=backend)
    scale = torch.compile(lambda x: x.tanh() * 2, backend=backend)
    model = build()
    forward = torch.compile(lambda x: model(x).sum(), backend=backend)
    x = torch.ones(4, 4)

    def others_again() -> int:
        num_before = len(compiled)
        scale(critic(torch.ones(2, 3)))
        return len(compiled) - num_before

    assert others_again() == 2
    forward(x)
    if not can_ask:
        monkeypatch.delattr(torch._C._dynamo.eval_frame, "_debug_get_cache_entry_list")
    with attach(model, EVERY_LAYER) as offloader:
        forward(x).backward()
        assert offloader.engine.num_layer_calls == 3
        assert others_again() == (0 if can_ask else 2)


@pytest.mark.thorough
def test_a_step_compiled_with_its_backward() -> None:
    expected = step(build())
    model = build()
    with attach(model, EVERY_LAYER) as offloader:

        def whole_step() -> None:
            x = torch.linspace(-1, 1, 16).view(4, 4)
            model(x).square().sum().backward()

        compiled = torch.compile(whole_step, backend="eager")
        for _ in range(2):
            model.zero_grad()
            compiled()
            assert_same_tensors(gradients_of(model), expected, "")
        assert offloader.engine.num_packs > 0
        assert offloader.host_pool.settle() == 0


@pytest.mark.thorough
def test_a_copy_of_an_attached_model_compiles() -> None:
    model = build()
    expected = step(model)
    with attach(model, EVERY_LAYER) as offloader:
        copied = compile_layers(copy.deepcopy(model))
        calls = offloader.engine.num_layer_calls
        assert_same_tensors(step(copied), expected, "")
        assert_same_tensors(step(copied), expected, "")
        assert offloader.engine.num_layer_calls == calls


def test_hooks_that_compiled_code_bypasses_are_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build()
    with attach(model, EVERY_LAYER) as offloader, caplog.at_level(logging.WARNING, "hf_pyao"):
        for layer in model.layers:  # what bypassing amounts to
            layer._forward_hooks.clear()
            layer._forward_pre_hooks.clear()
        for _ in range(3):
            step(model)
            offloader.warn_if_idle()
    (record,) = caplog.records
    assert "no layer was seen" in record.getMessage()
    assert "torch._dynamo.reset()" in record.getMessage()


@pytest.mark.thorough
def test_a_compiled_llama() -> None:
    def step(model: nn.Module) -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(**tiny_batch(), use_cache=False).loss.backward()
        return gradients_of(model)

    reference, model = (tiny_model("llama", num_hidden_layers=2) for _ in range(2))
    compile_layers(reference.model)
    expected = step(reference)
    with attach(model, EVERYTHING) as offloader:
        compile_layers(model.model)
        assert_same_tensors(step(model), expected, "")
        assert offloader.metrics()["offloaded_bytes"] > 0
        assert offloader.metrics()["kept_bytes/last layer"] > 0
        assert offloader.host_pool.settle() == 0
