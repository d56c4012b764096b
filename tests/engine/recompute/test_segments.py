"""Segments: what they save, when they run again, and what they refuse."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from hf_pyao import ModuleMap, Offloader, PyAOConfig, attach, register_module_map
from hf_pyao.engine.recompute.segment_lifecycle import SegmentLifecycle
from hf_pyao.errors import ConflictError, RecomputationError, SavedTensorModifiedError
from hf_pyao.model.map import architectures
from hf_pyao.plan.documents.plan import Plan
from tests.helpers import (
    EVERY_LAYER,
    FunctionLayer,
    Stack,
    assert_same_tensors,
    enable_checkpointing,
    gradients_of,
    linear_relu,
    tiny_batch,
    tiny_model,
)
from tests.helpers.ledger import AllocationLedger

BY_ONE = dataclasses.replace(EVERY_LAYER, checkpoint_every=1)
BY_TWO = dataclasses.replace(EVERY_LAYER, checkpoint_every=2)
NESTED = dataclasses.replace(EVERY_LAYER, checkpoint_every=3, checkpoint_nested=True)

of_both = pytest.mark.parametrize("config", [BY_TWO, NESTED], ids=["whole", "nested"])
"""Segments that run again as a whole, and layer by layer."""

INPUT = torch.linspace(-1, 1, 12).view(3, 4)


def step(model: nn.Module, x: torch.Tensor = INPUT) -> dict[str, torch.Tensor]:
    """Return gradients of one step, and a number drawn after it."""
    torch.manual_seed(3)
    random.seed(3)
    model.zero_grad()
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None
    drawn = torch.tensor([torch.rand(()).item(), random.random()])
    return {"input": x.grad, "drawn": drawn, **gradients_of(model)}


def smooth(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x @ layer.weight)


def lifecycle_of(offloader: Offloader) -> SegmentLifecycle:
    assert isinstance(offloader._lifecycle, SegmentLifecycle)
    return offloader._lifecycle


def check(*functions: Callable[..., Any], config: PyAOConfig = BY_TWO, num_runs: int) -> None:
    """Check that layers that compute *functions* have the same gradients in segments."""
    model = Stack(*functions)
    expected = step(copy.deepcopy(model))
    with attach(model, config) as offloader:
        assert_same_tensors(step(model), expected, "")
        assert lifecycle_of(offloader).filled.num_runs == num_runs
        assert offloader.host_pool.settle() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


# ---- what runs again, and how far ----------------------------------------------------------------


def test_each_layer_runs_again_once_and_no_further_than_needed() -> None:
    calls: list[str] = []

    def counted(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        calls.append("start")
        x = torch.relu(x @ layer.weight)
        calls.append("saved all")
        return x + 1

    model = Stack(counted, counted, counted, counted)
    with attach(model, BY_TWO) as offloader:
        step(model)
        assert calls.count("start") == 8
        assert calls.count("saved all") == 4 + 2  # of each segment the last layer stops early
        metrics = offloader.metrics()
        assert metrics["offloaded_bytes"] == 2 * INPUT.nbytes
        assert metrics["would_hold_bytes"] == 2 * INPUT.nbytes + metrics["recomputed_bytes"]


@pytest.mark.parametrize("number", [0, 2, 5])
def test_a_plan_says_how_many_of_the_first_layers_run_again(number: int, tmp_path: Path) -> None:
    """The others keep what they save, as the plan says of them."""
    plan = Plan(slots=[], otherwise="keep", levers={"checkpoint_every": 1}, num_checkpointed=number)
    plan.to_json_file(tmp_path / "plan.json")
    config = dataclasses.replace(EVERY_LAYER, policy="plan", plan=str(tmp_path / "plan.json"))
    check(*[smooth] * 5, config=config, num_runs=number)


# ---- backward more than once ---------------------------------------------------------------------


@of_both
def test_gradients_of_gradients(config: PyAOConfig) -> None:
    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        x = INPUT.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
        return gradients_of(model)

    model = Stack(smooth, smooth, smooth)
    expected = run(copy.deepcopy(model))
    with attach(model, config):
        assert_same_tensors(run(model), expected, "")


@of_both
def test_saved_tensors_that_are_looked_at_outside_of_backward(config: PyAOConfig) -> None:
    model = Stack(smooth, smooth)
    with attach(model, config) as offloader:
        out = model(INPUT)
        hidden = torch.sin(INPUT @ model.layers[0].weight)
        assert torch.equal(out.grad_fn._saved_self, hidden @ model.layers[1].weight)
        assert not list(lifecycle_of(offloader).filled._segments)
        out.sum().backward()


@of_both
def test_a_gradient_that_is_taken_inside_of_a_layer(config: PyAOConfig) -> None:
    def force(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(
            torch.sin(x @ layer.weight).sum(), layer.weight, create_graph=True
        )
        return torch.tanh(x @ grad)

    model = Stack(force, force, force)
    expected = step(copy.deepcopy(model))
    with attach(model, config):
        assert_same_tensors(step(model), expected, "")


# ---- what lies between layers --------------------------------------------------------------------


class Between(Stack):
    """Does something to the hidden states between its layers."""

    between: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda x: x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return x


@pytest.mark.parametrize(
    ("between", "num_segments"),
    [
        (lambda x: x, 2),
        (lambda x: x + 1, 4),
        (lambda x: x.add_(1), 4),
        (lambda x: x.view_as(x), 4),
        (lambda x: nn.functional.dropout(x, 0.2), 4),
    ],
    ids=["nothing", "added", "added in place", "a view", "dropout"],
)
def test_what_comes_between_layers_ends_a_segment(
    between: Callable[[torch.Tensor], torch.Tensor], num_segments: int
) -> None:
    def smooth(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ layer.weight) * 2

    model = Between(smooth, smooth, smooth, smooth)
    model.between = between
    expected = step(copy.deepcopy(model))
    with attach(model, BY_TWO) as offloader:
        assert_same_tensors(step(model), expected, "")
        assert lifecycle_of(offloader).filled.num_runs == num_segments


def test_a_frozen_part_saves_nothing() -> None:
    model = Stack(linear_relu, linear_relu, linear_relu, linear_relu)
    model.layers[0].weight.requires_grad_(False)
    model(INPUT).square().sum().backward()
    expected = gradients_of(model)
    model.zero_grad()
    with attach(model, BY_TWO) as offloader:
        model(INPUT).square().sum().backward()
        assert_same_tensors(gradients_of(model), expected, "")
        assert lifecycle_of(offloader).filled.num_runs == 2  # layers 1 and 2; layer 3
        assert offloader.metrics()["offloaded_bytes"] == 2 * INPUT.nbytes


class Pair(NamedTuple):
    first: torch.Tensor
    second: str


class Sharing(nn.Module):
    """Layers that get more than hidden states: what requires a gradient, and what a layer made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.rand(4))
        self.layers = nn.ModuleList(FunctionLayer(self.function) for _ in range(4))

    @staticmethod
    def function(
        layer: FunctionLayer, x: torch.Tensor, states: Any, bias: torch.Tensor | None, memo: Any
    ) -> Any:
        key, value = states["key"], states["value"][0].first
        assert states["value"][0].second == "text"
        bias = torch.tanh(layer.weight.sum(0)) if bias is None else bias
        memo.setdefault("seen", []).append(torch.sin(x))
        out = torch.sin(x @ layer.weight * key + bias) * value
        return out * memo["seen"][0], bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = {"key": self.scale.exp(), "value": [Pair(torch.cos(self.scale), "text")]}
        bias, memo = None, {}
        for layer in self.layers:
            x, bias = layer(x, states, bias=bias, memo=memo)
        return x


@pytest.fixture
def _sharing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "_registered_maps", {})
    register_module_map("Sharing", ModuleMap(layers=("layers",)))


@pytest.mark.usefixtures("_sharing_is_known")
@pytest.mark.parametrize(
    ("length", "is_nested"), [(1, False), (2, False), (2, True), (3, True), (4, False), (100, True)]
)
def test_arguments_beside_the_hidden_states(length: int, is_nested: bool) -> None:
    model = Sharing()
    expected = step(copy.deepcopy(model))
    config = dataclasses.replace(NESTED, checkpoint_every=length, checkpoint_nested=is_nested)
    with attach(model, config) as offloader:
        assert_same_tensors(step(model), expected, "")
        assert lifecycle_of(offloader).filled.num_runs == (4 if is_nested else -(-4 // length))


# ---- hooks and state of others -------------------------------------------------------------------


@of_both
@pytest.mark.parametrize("is_attached_first", [True, False])
def test_module_hooks_of_others(is_attached_first: bool, config: PyAOConfig) -> None:
    """Those on a layer may change what it gets and what it returns."""

    def add_hooks(model: Stack) -> None:
        for layer in model.layers[1:]:
            layer.register_forward_pre_hook(lambda module, args: (torch.sin(args[0]),))
            layer.register_forward_pre_hook(
                lambda module, args, kwargs: ((torch.cos(args[0]),), kwargs), with_kwargs=True
            )
            layer.register_forward_hook(lambda module, args, out: torch.tanh(out))

    model = Stack(linear_relu, linear_relu, linear_relu)
    plain = copy.deepcopy(model)
    add_hooks(plain)
    expected = step(plain)
    if not is_attached_first:
        add_hooks(model)
    with attach(model, config):
        if is_attached_first:
            add_hooks(model)
        assert_same_tensors(step(model), expected, "")


class OfAParameter(Stack):
    """Gives its first layer a parameter as it is, whatever comes in."""

    def __init__(self, *functions: Callable[..., Any], is_trained: bool) -> None:
        super().__init__(*functions)
        self.queries = nn.Parameter(INPUT.clone(), requires_grad=is_trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.queries) * x


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # untrained
@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("is_before", [True, False])
def test_backward_hooks_of_a_layer_that_gets_a_parameter(
    is_trained: bool, is_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch gives the layer a view of the parameter then, which is saved as any tensor is."""
    monkeypatch.setattr(architectures, "_registered_maps", {})
    register_module_map("OfAParameter", ModuleMap(layers=("layers",)))

    def add_hook(model: Stack) -> None:
        if is_before:
            model.layers[0].register_full_backward_pre_hook(lambda module, grads: None)
        else:
            model.layers[0].register_full_backward_hook(lambda module, inner, outer: None)

    model = OfAParameter(linear_relu, linear_relu, is_trained=is_trained)
    add_hook(model)
    expected = step(copy.deepcopy(model))
    for config in (BY_ONE, BY_TWO):
        with attach(model, config):
            assert_same_tensors(step(model), expected, "")


# ---- in-place changes ----------------------------------------------------------------------------


def test_a_parameter_that_changes_before_backward() -> None:
    model = Stack(linear_relu, linear_relu)
    with attach(model, BY_TWO):
        loss = model(INPUT.clone().requires_grad_()).sum()
        with torch.no_grad():
            model.layers[0].weight.mul_(2)
        with pytest.raises(SavedTensorModifiedError, match="weight"):
            loss.backward()


def test_a_saved_tensor_that_changes_inside_of_a_layer() -> None:
    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ layer.weight
        out = torch.sin(hidden)
        hidden.add_(1)
        return torch.cos(out)

    model = Stack(function)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(INPUT).sum().backward()
    with attach(model, BY_ONE):
        with pytest.raises(SavedTensorModifiedError, match="modified by an inplace operation"):
            model(INPUT).sum().backward()


def test_a_layer_that_changes_its_input_runs_once(caplog: pytest.LogCaptureFixture) -> None:
    def plus_one(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight + 1

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.add_(1) @ layer.weight)

    model = Stack(plus_one, function, plus_one, linear_relu)
    expected = step(copy.deepcopy(model))
    with attach(model, BY_ONE) as offloader:
        for num_runs in (3, 6):
            assert_same_tensors(step(model), expected, "")
            assert lifecycle_of(offloader).filled.num_runs == num_runs
        assert offloader.host_pool.settle() == 0
    assert "'layers.1' does not run again: it changes in place" in caplog.text
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def masked(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm((torch.arange(9.0).view(3, 3) % 2).to_sparse_csr(), x @ layer.weight)


def ragged(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    rows = torch.nested.as_nested_tensor([x[:1] @ layer.weight, x[1:] @ layer.weight])
    return torch.tanh(torch.nested.to_padded_tensor(rows, 0.0)).sum(0).repeat(2, 1)[:3]


def sparse_between(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh((x.to_dense() if x.is_sparse else x) @ layer.weight).to_sparse()


def scaled_in_place(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        layer.weight.mul_(0.5)
    return torch.tanh(x @ layer.weight)


def steep_and_in_place(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    """Goes back through what it has saved before it is refused."""
    y = x.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(torch.sin(y @ layer.weight).sum(), y, create_graph=True)
    return grad * x.add_(1)


def linearized(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    y, slope = torch.func.linearize(lambda x: torch.sin(x @ layer.weight), x)
    return y + slope(torch.cos(x))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr:UserWarning")
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (masked, "it saves a sparse or nested tensor"),
        (ragged, "it saves a sparse or nested tensor"),
        (sparse_between, "a sparse or nested one"),
        (linearized, "while a graph is traced (torch.func.linearize)"),
        (scaled_in_place, "'weight', in place"),
        (steep_and_in_place, "changes in place what it is given"),
    ],
)
def test_layers_that_run_once_and_why(
    function: Callable[..., Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def around(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        return (x.to_dense() if x.is_sparse else x) @ layer.weight + 1

    model = Stack(around, function, around, function, around)
    plain = copy.deepcopy(model)
    with attach(model, BY_ONE):
        for _ in range(3):
            assert_same_tensors(step(model), step(plain), "")
    said = [record.message for record in caplog.records if reason in record.message]
    assert len(said) == 1


def test_lazy_layers_run_again_from_the_second_step_on(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Stack:
        torch.manual_seed(2)
        model = Stack(*[lambda layer, x: torch.tanh(layer.lazy(x))] * 2)
        for layer in model.layers:
            layer.lazy = nn.LazyLinear(4)
        return model

    model, plain = make(), make()
    with attach(model, BY_ONE) as offloader:
        for num_runs in (0, 2):
            assert_same_tensors(step(model), step(plain), "")
            assert lifecycle_of(offloader).filled.num_runs == num_runs
    assert "its forward changes 'lazy.weight', in place" in caplog.text


@pytest.mark.parametrize(
    ("attribute", "num_runs"), [("applied_pre_backward_ref_cnt", 6), ("num_calls", 0)]
)
def test_counters_of_zero_do_not_keep_layers_from_running_again(
    attribute: str, num_runs: int
) -> None:
    def counted(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        setattr(layer, attribute, getattr(layer, attribute) + 1)
        return smooth(layer, x)

    model = Stack(counted, counted)
    for layer in model.layers:
        setattr(layer, attribute, 0)
    plain = copy.deepcopy(model)
    with attach(model, BY_ONE) as offloader:
        for _ in range(3):
            assert_same_tensors(step(model), step(plain), "")
        assert lifecycle_of(offloader).filled.num_runs == num_runs


@pytest.mark.usefixtures("_sharing_is_known")
def test_an_argument_that_changes_before_backward() -> None:
    model = Sharing()
    states: list[torch.Tensor] = []
    model.layers[2].register_forward_pre_hook(lambda module, args: states.append(args[1]["key"]))
    with attach(model, BY_TWO):
        loss = model(INPUT).sum()
        with torch.no_grad():
            states[0].add_(1)
        with pytest.raises(SavedTensorModifiedError, match="argument of layer"):
            loss.backward()


# ---- failures ------------------------------------------------------------------------------------


def test_a_layer_that_does_otherwise_the_second_time() -> None:
    calls = []

    def otherwise(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        x = torch.sin(x @ layer.weight)
        return torch.sin(x.float() if len(calls) < 2 else x.double())

    model = Stack(otherwise)
    with attach(model, BY_ONE):
        with pytest.raises(RecomputationError, match=r"'layers\.0'.*float64.*float32"):
            model(INPUT).sum().backward()


def test_a_layer_that_saves_less_the_second_time() -> None:
    calls = []

    def less(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        x = torch.sin(x @ layer.weight)
        return torch.sin(x) if len(calls) < 2 else x

    model = Stack(less)
    with attach(model, BY_ONE):
        with pytest.raises(RecomputationError, match="saved 2 tensors, and in forward at least 3"):
            model(INPUT).sum().backward()


@of_both
@pytest.mark.parametrize("fails_in", [0, 1])
def test_a_backward_that_fails_may_be_tried_again(config: PyAOConfig, fails_in: int) -> None:
    fails = []

    def hook(grad: torch.Tensor) -> None:
        if fails:
            fails.clear()
            raise ValueError("in the middle")

    def watched(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(hook)
        return torch.sin(x @ layer.weight)

    functions = [smooth, smooth, smooth]
    functions[fails_in] = watched
    model = Stack(*functions)
    expected = step(copy.deepcopy(model))
    with attach(model, config):
        fails.append(True)
        loss = model(INPUT.clone().requires_grad_()).square().sum()
        with pytest.raises(ValueError, match="in the middle"):
            loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        found = gradients_of(model)
    assert_same_tensors(found, {n: g for n, g in expected.items() if n in found}, "")


# ---- memory --------------------------------------------------------------------------------------


def peak_bytes(config: PyAOConfig | None, num_layers: int = 8, *, is_retained: bool = False) -> int:
    def wide(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.sin(x @ layer.weight)
        return x

    model = Stack(*[wide] * num_layers, size=8)
    x = torch.randn(4096, 8)
    offloader = None if config is None else attach(model, config)
    model(x).sum().backward()  # what is allocated once
    with AllocationLedger() as ledger:
        model(x).sum().backward(retain_graph=is_retained)
    if offloader is not None:
        offloader.detach()
    return ledger.peak_bytes


def test_memory_of_segments() -> None:
    """Kept inputs and one segment; the whole graph without. (The host's copies would count.)"""
    nbytes = 4096 * 8 * 4
    layer = 8 * nbytes  # of four operations each: what goes in, what comes out
    kept = functools.partial(
        PyAOConfig, policy="off", host_memory_gib=0.1, keep_last_layers=0, min_bytes=0
    )
    none, by_one, by_two = (
        peak_bytes(config) for config in (None, kept(checkpoint_every=1), kept(checkpoint_every=2))
    )
    retained = peak_bytes(kept(checkpoint_every=1), is_retained=True)
    slack = 4 * nbytes  # gradients, and the layer's own arithmetic
    assert by_one <= 8 * nbytes + layer + slack
    assert by_two <= 4 * nbytes + 2 * layer + slack
    assert retained <= 8 * nbytes + 2 * layer + slack  # the one before goes as the next begins
    assert none >= 8 * layer
    assert by_one < none / 2


# ---- refusals ------------------------------------------------------------------------------------


def test_checkpointing_of_others_is_refused() -> None:
    model = tiny_model("llama")
    enable_checkpointing(model, use_reentrant=False)
    with pytest.raises(ConflictError, match=r"gradient checkpointing is on.*checkpoint_every=0"):
        attach(model, BY_ONE)
    model = tiny_model("llama")
    with attach(model, BY_ONE):
        enable_checkpointing(model, use_reentrant=False)
        with pytest.raises(ConflictError, match="after the model was attached"):
            model(**tiny_batch(0))


def test_checkpoint_wrappers_are_refused() -> None:
    model = Stack(linear_relu, linear_relu)
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    with pytest.raises(ConflictError, match="'layers.0' is wrapped in torch's CheckpointWrapper"):
        attach(model, BY_ONE)
    model = Stack(linear_relu, linear_relu)
    with attach(model, BY_ONE):
        with pytest.raises(ConflictError, match=r"layer 'layers\.0' runs in a checkpoint"):
            checkpoint(model, INPUT, use_reentrant=False)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_compiled_layers_are_not_run_again_and_said(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack(linear_relu, linear_relu)
    expected = step(copy.deepcopy(model))
    for layer in model.layers:
        layer.compile(backend="eager")
    with caplog.at_level(logging.WARNING), attach(model, BY_TWO) as offloader:
        assert_same_tensors(step(model), expected, "")
        assert lifecycle_of(offloader).filled.num_runs == 0
    assert "compiled code" in caplog.text
