"""What kernels of attention return leaves, and comes back in place of running them again."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pyao import attach
from hf_pyao.engine.recompute.kept_attention import KERNELS, SeenAttention
from hf_pyao.engine.recompute.operations import Rules
from hf_pyao.engine.runtime.observer import Observer
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.engine.stores import HostPool
from tests.helpers import (
    EVERY_LAYER,
    HIDDEN,
    NUM_LAYERS,
    FunctionLayer,
    Stack,
    assert_same_tensors,
    assert_same_trajectory,
    gradients_of,
    tiny_batch,
    tiny_model,
    train,
)

SAVING = dataclasses.replace(EVERY_LAYER, checkpoint_every=1, save_attention=True)
STEP = ((tiny_batch(0),),)
INPUT_BYTES = 2 * 8 * HIDDEN * 4
STATISTICS_BYTES = 2 * 8 * 4 * 4
"""Of one layer's attention: batch x length x heads, fp32."""


class Kernels(TorchDispatchMode):
    """Counts the kernels that run."""

    only_watches = True

    num_runs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_runs += func._overloadpacket.__name__ in KERNELS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "bart", "gpt2", "gemma3_text", "qwen3_moe"])
def test_training_is_bitwise_the_same(
    model_type: str, autocast: torch.dtype | None, length: int
) -> None:
    model = tiny_model(model_type, attention="sdpa")
    expected = train(copy.deepcopy(model), autocast=autocast)
    with attach(model, dataclasses.replace(SAVING, checkpoint_every=length)) as offloader:
        assert_same_trajectory(train(model, autocast=autocast), expected)
        totals = offloader.totals()
        assert totals["num_slots"] > NUM_LAYERS
        assert totals["reloaded_bytes"] == totals["offloaded_bytes"]
        assert offloader.host_pool.settle() == 0


def test_no_kernel_runs_twice() -> None:
    for config, factor in ((SAVING, 1), (dataclasses.replace(SAVING, save_attention=False), 2)):
        model = tiny_model("llama", attention="sdpa")
        with attach(model, config), Kernels() as kernels:
            train(model, STEP)
        assert kernels.num_runs == factor * NUM_LAYERS


def test_what_leaves_and_under_which_name() -> None:
    class Names(Observer):
        def on_slot(self, slot: Slot, *_: Any) -> None:
            names.append(f"{slot.layer}.{slot.name}")

    names: list[str] = []
    model = tiny_model("llama", attention="sdpa")
    with attach(model, SAVING) as offloader:
        offloader.engine.observe(Names())
        train(model, STEP)
        expected = ["model.layers.0.:0", "model.layers.0.self_attn:0", "model.layers.0.self_attn:1"]
        assert sorted(names)[:3] == expected
        nbytes = 2 * INPUT_BYTES + STATISTICS_BYTES
        assert offloader.metrics()["offloaded_bytes"] == NUM_LAYERS * nbytes


def test_where_the_host_has_no_room_it_runs_again() -> None:
    """The inputs that are still to come have their place first, each layer's attention then."""
    model = tiny_model("llama", attention="sdpa")
    expected = train(copy.deepcopy(model), STEP)
    with attach(model, dataclasses.replace(SAVING, save_attention=False)) as offloader:
        train(copy.deepcopy(model), STEP)
    chunk = 2048  # of the pool: an input, or what attention returns
    for num_chunks, num_runs in ((3, 2 * NUM_LAYERS), (100, NUM_LAYERS)):
        ours = copy.deepcopy(model)
        pool = HostPool(num_chunks * chunk, pin=False)
        with attach(ours, SAVING, host_pool=pool) as offloader, Kernels() as kernels:
            found = train(ours, STEP)
        assert_same_trajectory(found, expected)
        assert kernels.num_runs == num_runs, num_chunks
        assert offloader.totals().get("kept_bytes/host memory full", 0) == 0


def attention(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    q = (x @ layer.weight).view(2, 6, 2, 4).transpose(1, 2)
    out = nn.functional.scaled_dot_product_attention(q, q * 2, torch.sin(q), is_causal=True)
    return x + out.transpose(1, 2).reshape(2, 6, 8)


def dropped(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    q = (x @ layer.weight).view(2, 6, 2, 4).transpose(1, 2)
    out = nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.3)
    return nn.functional.dropout(x + out.transpose(1, 2).reshape(2, 6, 8), 0.2)


def changed(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    q = (x @ layer.weight).view(2, 6, 2, 4).transpose(1, 2)
    with torch.no_grad():
        hidden = nn.functional.scaled_dot_product_attention(q, q, q)
    hidden.add_(1)
    out = nn.functional.scaled_dot_product_attention(q, torch.sin(q), q)
    return x + torch.tanh(out * hidden).transpose(1, 2).reshape(2, 6, 8)


@pytest.mark.parametrize("function", [attention, dropped, changed])
@pytest.mark.parametrize("policy", ["all", "off"])
def test_layers_of_all_kinds(function: Any, policy: str) -> None:
    def step(model: nn.Module) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        loss = model(torch.linspace(-1, 1, 96).view(2, 6, 8)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return {"drawn": torch.rand(1), **gradients_of(model)}

    model = Stack(function, function, function, size=8)
    expected = step(copy.deepcopy(model))
    with attach(model, dataclasses.replace(SAVING, policy=policy, checkpoint_every=2)):
        assert_same_tensors(step(model), expected, "")
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize(("dropout", "is_kept"), [(0.0, True), (0.1, False)])
def test_a_kernel_that_draws_random_numbers_runs_again(dropout: float, is_kept: bool) -> None:
    seen = SeenAttention(Rules(), lambda nbytes: True)
    with FakeTensorMode():  # no CPU has the kernel
        q = torch.empty(1, 2, 8, 16, requires_grad=True)
        seen.start()
        try:
            torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, dropout)
        finally:
            seen.stop()
    assert [call is not None for call in seen.calls] == [is_kept]


@pytest.mark.parametrize("fails_at", range(1, 7))
def test_a_failure_leaves_no_mode(fails_at: int) -> None:
    calls: list[int] = []

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        out = attention(layer, x)
        if len(calls) == fails_at:
            raise ValueError("here")
        return torch.sin(torch.sin(out) @ layer.weight)

    model = Stack(function, function, function, size=8)
    with attach(model, SAVING):
        with pytest.raises(ValueError, match="here"):
            model(torch.ones(2, 6, 8)).sum().backward()
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_without_a_kernel_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama", attention="eager")
    with attach(model, SAVING) as offloader:
        train(model)
        assert offloader.metrics()["offloaded_bytes"] == NUM_LAYERS * INPUT_BYTES
    assert caplog.text.count("finds no attention kernel") == 1
