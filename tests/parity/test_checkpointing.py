"""Checkpointing: only layer inputs are packed, in whichever way it is wrapped around the layers."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from hf_pyao import ModuleMap, Offloader, attach, register_module_map
from hf_pyao.model.map import architectures
from tests.helpers import (
    EVERY_LAYER,
    EVERYTHING,
    HIDDEN,
    MAIN,
    NUM_LAYERS,
    FunctionLayer,
    Stack,
    assert_same_tensors,
    assert_same_trajectory,
    enable_checkpointing,
    gradients_of,
    tiny_batch,
    tiny_model,
    train,
)

STEP = ((tiny_batch(0),),)
INPUT_BYTES = 2 * 8 * HIDDEN * 4
"""Size of one layer's input: batch x length x hidden, fp32."""

each_mode = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "saved"])


def layers_of(model: nn.Module) -> nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)


def check_only_inputs_moved(offloader: Offloader, num_inputs: int) -> None:
    """Check that one input per layer moved; what else was packed is the same for all, or empty."""
    stats = offloader.engine.figures.last
    assert stats is not None
    assert stats.offloaded_bytes == num_inputs * INPUT_BYTES
    assert stats.reloaded_bytes == stats.offloaded_bytes
    assert stats.would_hold_bytes <= stats.offloaded_bytes + INPUT_BYTES // 2
    assert set(stats.kept_bytes) <= {"empty", "shared by layers"}
    assert offloader.host_pool.settle() == 0


@each_mode
@pytest.mark.parametrize("model_type", MAIN)
def test_only_layer_inputs_are_packed(model_type: str, use_reentrant: bool) -> None:
    model = tiny_model(model_type, dropout=0.1)
    enable_checkpointing(model, use_reentrant=use_reentrant)
    with attach(model, EVERY_LAYER) as offloader:
        train(model, STEP)
        check_only_inputs_moved(offloader, NUM_LAYERS)


@each_mode
def test_the_last_layers_input_is_kept(use_reentrant: bool) -> None:
    model = tiny_model("llama")
    enable_checkpointing(model, use_reentrant=use_reentrant)
    with attach(model, EVERYTHING) as offloader:
        train(model, STEP)
        assert offloader.metrics()["kept_bytes/last layer"] == INPUT_BYTES
        assert offloader.metrics()["offloaded_bytes"] == (NUM_LAYERS - 1) * INPUT_BYTES


@each_mode
def test_switched_on_and_off_while_attached(use_reentrant: bool) -> None:
    model = tiny_model("opt", dropout=0.1)
    plain = copy.deepcopy(model)
    enable = functools.partial(enable_checkpointing, use_reentrant=use_reentrant)
    with attach(model, EVERY_LAYER) as offloader:
        for num_inputs, change in ((None, None), (NUM_LAYERS, enable), (None, switch_off)):
            if change is not None:
                change(plain)
                change(model)
            expected = train(plain, STEP)
            assert_same_trajectory(train(model, STEP), expected, f"after {change}")
            if num_inputs:
                check_only_inputs_moved(offloader, num_inputs)
            else:
                assert offloader.metrics()["offloaded_bytes"] > 2 * NUM_LAYERS * INPUT_BYTES


def switch_off(model: Any) -> None:
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()


@each_mode
def test_every_second_layer(use_reentrant: bool) -> None:
    model = tiny_model("gpt2", dropout=0.1)
    enable_checkpointing(model, use_reentrant=use_reentrant)
    layers_of(model)[1].gradient_checkpointing = False
    expected = train(copy.deepcopy(model), STEP)
    with attach(model, EVERY_LAYER) as offloader:
        assert_same_trajectory(train(model, STEP), expected)
        # Two inputs, and the one layer between them whole.
        assert offloader.metrics()["offloaded_bytes"] > 10 * INPUT_BYTES
        assert offloader.host_pool.settle() == 0


def test_detaching_leaves_the_checkpointing_function_as_it_was() -> None:
    model = tiny_model("llama")
    enable_checkpointing(model, use_reentrant=False)
    functions = [m._gradient_checkpointing_func for m in layers_of(model)]
    with attach(model, EVERYTHING):
        train(model, STEP)
        copied = copy.deepcopy(model)
    assert [m._gradient_checkpointing_func for m in layers_of(model)] == functions
    wrapped = [type(m._gradient_checkpointing_func).__name__ for m in layers_of(copied)]
    assert "CheckpointFunction" not in wrapped


# ---- checkpointing around __call__, as transformers did before 5.23
# --------------------------------


class CallLayer(nn.Module):
    """A layer that checkpoints its own ``__call__``, hooks and all."""

    gradient_checkpointing = True

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.1)
        self._gradient_checkpointing_func: Callable[..., Any] = functools.partial(
            checkpoint, use_reentrant=use_reentrant
        )
        self.calls = 0
        self.fails_at_call = -1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and self.training:
            call = functools.partial(super().__call__, **kwargs)
            return self._gradient_checkpointing_func(call, *args)
        return super().__call__(*args, **kwargs)

    def forward(self, hidden_states: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.fails_at_call:
            raise ValueError("this call fails")
        return hidden_states + self.dropout(self.down(torch.relu(self.up(hidden_states)))) * scale


class CallModel(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(CallLayer(use_reentrant) for _ in range(NUM_LAYERS))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        scale = torch.linspace(0.5, 1.0, HIDDEN)
        for layer in self.layers:
            hidden_states = layer(hidden_states, scale=scale)
        return hidden_states


@pytest.fixture
def _call_model_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "_registered_maps", {})
    register_module_map("CallModel", ModuleMap(layers=("layers",)))


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    x = torch.randn(2, 8, HIDDEN, requires_grad=True)
    model(x).square().mean().backward()
    assert x.grad is not None
    return {"input": x.grad, **gradients_of(model)}


@each_mode
@pytest.mark.usefixtures("_call_model_is_known")
def test_only_layer_inputs_are_packed_where_call_is_checkpointed(use_reentrant: bool) -> None:
    model = CallModel(use_reentrant)
    expected = step(copy.deepcopy(model))
    with attach(model, EVERY_LAYER) as offloader:
        for _ in range(2):
            assert_same_tensors(step(model), expected, "checkpointed")
            check_only_inputs_moved(offloader, NUM_LAYERS)
        model.layers[1].gradient_checkpointing = False
        assert_same_tensors(step(model), expected, "the middle layer not checkpointed")
        assert offloader.metrics()["offloaded_bytes"] > NUM_LAYERS * INPUT_BYTES
    assert all(type(m._gradient_checkpointing_func) is functools.partial for m in model.layers)


@each_mode
@pytest.mark.usefixtures("_call_model_is_known")
@pytest.mark.parametrize("fails_at_call", [1, 2], ids=["in forward", "when recomputed"])
def test_a_checkpointed_call_that_fails(use_reentrant: bool, fails_at_call: int) -> None:
    model = CallModel(use_reentrant)
    expected = step(copy.deepcopy(model))
    with attach(model, EVERY_LAYER) as offloader:
        model.layers[1].fails_at_call = fails_at_call
        with pytest.raises(ValueError, match="this call fails"):
            step(model)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert_same_tensors(step(model), expected, "after the failure")
        check_only_inputs_moved(offloader, NUM_LAYERS)


# ---- checkpointing inside a layer --------------------------------------------------------------------


@each_mode
def test_a_layer_that_checkpoints_a_part_of_itself(use_reentrant: bool) -> None:
    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        def part(hidden: torch.Tensor) -> torch.Tensor:
            dropped = nn.functional.dropout(hidden @ layer.weight, 0.5)
            return torch.sigmoid(dropped) * torch.tanh(dropped)

        hidden = torch.sin(x @ layer.weight)
        return torch.relu(checkpoint(part, hidden, use_reentrant=use_reentrant) @ layer.weight)

    model = Stack(function, function, function, size=HIDDEN)
    plain = copy.deepcopy(model)
    x = torch.randn(2, 8, HIDDEN)
    for each in (plain, model):
        with attach(each, EVERY_LAYER) if each is model else contextlib.nullcontext() as offloader:
            torch.manual_seed(3)
            each(x).sum().backward()
    assert_same_tensors(gradients_of(model), gradients_of(plain), "")
    # Of each layer its input, the sine's argument, the part's input and output, and the result,
    # which is the next layer's input.
    assert offloader.metrics()["offloaded_bytes"] == (4 * NUM_LAYERS + 1) * INPUT_BYTES


# ---- torch's CheckpointWrapper, as FSDP recipes use it
# ---------------------------------------------


@pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl:FutureWarning")
@pytest.mark.parametrize("mode", list(CheckpointImpl), ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize(
    "is_attached_first", [False, True], ids=["wrapped first", "attached first"]
)
def test_checkpoint_wrapper(mode: CheckpointImpl, is_attached_first: bool) -> None:
    model = tiny_model("llama")
    expected = train(copy.deepcopy(model), STEP)
    layer_class = type(layers_of(model)[0])

    def wrap() -> None:
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=mode),
            check_fn=lambda module: type(module) is layer_class,
        )

    if is_attached_first:
        offloader = attach(model, EVERY_LAYER)
        wrap()
    else:
        wrap()
        offloader = attach(model, EVERY_LAYER)
    found = train(model, STEP)
    for named in (found.parameters, *found.gradients):
        for name in list(named):
            named[name.replace("_checkpoint_wrapped_module.", "")] = named.pop(name)
    assert_same_trajectory(found, expected)
    if is_attached_first:
        # The hooks sit inside the checkpoint: they stand back rather than defeat it.
        assert offloader.engine.figures.last is None
    else:
        check_only_inputs_moved(offloader, NUM_LAYERS)
    offloader.detach()
