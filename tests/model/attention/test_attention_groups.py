"""Models whose attention runs in groups train as they do without."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.recompute.kept_attention import KERNELS
from hf_pyao.levers import Levers
from hf_pyao.model.attention.attention_groups import KEY
from tests.helpers import (
    EVERY_LAYER,
    NUM_LAYERS,
    Batch,
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

GROUPS = PyAOConfig(policy="off", attention_groups=2)


def unpadded(seed: int) -> Batch:
    """Return a batch that says that it has no padding.

    Where nothing is said, transformers 4 gives attention a mask, in case samples are packed.
    """
    batch = tiny_batch(seed)
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


STEP = ((unpadded(0),),)
STEPS = ((unpadded(0),), (unpadded(1), unpadded(2)), (unpadded(3), unpadded(4)))

CONFIGS = {
    "alone": GROUPS,
    "offloaded": dataclasses.replace(EVERY_LAYER, attention_groups=2),
    "kept": dataclasses.replace(
        EVERY_LAYER, attention_groups=3, checkpoint_every=1, save_attention=True
    ),
    "nested": dataclasses.replace(
        EVERY_LAYER, attention_groups=2, checkpoint_every=2, checkpoint_nested=True
    ),
    "rebuilt": dataclasses.replace(
        EVERY_LAYER, attention_groups=2, recompute_modules=("pointwise",)
    ),
}


class Kernels(TorchDispatchMode):
    """Counts the kernels that run, forward and backward."""

    only_watches = True

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.num_backward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if name in KERNELS:
            self.shapes.append(tuple(args[0].shape[:2]))
        self.num_backward += name.endswith("for_cpu_backward")
        return func(*args, **(kwargs or {}))


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "model_type", ["opt", "gpt2", "llama", "qwen2", "gemma3_text", "phi3", "bart", "qwen3_moe"]
)
def test_training_is_bitwise_the_same(
    model_type: str, autocast: torch.dtype | None, name: str
) -> None:
    model = tiny_model(model_type, attention="sdpa")
    expected = train(copy.deepcopy(model), STEPS, autocast=autocast)
    with attach(model, CONFIGS[name]) as offloader:
        assert_same_trajectory(train(model, STEPS, autocast=autocast), expected)
        assert offloader.attention_groups is not None
        plan = offloader.attention_groups.last_plan
        if model_type == "gemma3_text":  # its windows are masks
            assert plan is None and "a mask is given" in offloader.attention_groups.describe()
        else:
            assert plan is not None and plan.num_groups > 1
        assert offloader.host_pool.settle() == 0
    assert not any(KEY in vars(module) or "forward" in vars(module) for module in model.modules())


def test_a_batch_that_does_not_say_whether_it_is_padded() -> None:
    """Its calls are divided, or it is said that transformers has made a mask."""
    model = tiny_model("llama", attention="sdpa")
    with attach(model, GROUPS) as offloader:
        train(model, ((tiny_batch(0),),))
        assert offloader.attention_groups is not None
        said = offloader.attention_groups.describe()
        assert (offloader.attention_groups.last_plan is None) == ("a mask is given" in said)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_with_checkpointing_of_transformers(use_reentrant: bool) -> None:
    model = tiny_model("llama", attention="sdpa")
    enable_checkpointing(model, use_reentrant=use_reentrant)
    expected = train(copy.deepcopy(model), STEPS)
    with attach(model, GROUPS), Kernels() as seen:
        assert_same_trajectory(train(model, STEPS), expected)
    # Of two samples with four heads; the reentrant kind runs forward without gradients first.
    assert set(seen.shapes) == ({(1, 4), (2, 4)} if use_reentrant else {(1, 4)})


@pytest.mark.parametrize("name", ["offloaded", "kept"])
def test_what_leaves_is_what_leaves_without(name: str) -> None:
    found = []
    for groups in ("off", 4):
        model = tiny_model("llama", attention="sdpa")
        with attach(model, dataclasses.replace(CONFIGS[name], attention_groups=groups)) as ours:
            with Kernels() as seen:
                train(model, STEP)
            metrics = ours.metrics()
            found.append({key: metrics[key] for key in ("offloaded_bytes", "num_slots")})
            num_groups = 1 if groups == "off" else 4
            # Forward, and no second run where the results are kept.
            assert len(seen.shapes) == seen.num_backward == num_groups * NUM_LAYERS
    assert found[0] == found[1]


def test_the_number_changes_between_forward_and_backward() -> None:
    """A layer that runs again finds the groups of its forward, and saves the same tensors."""
    config = dataclasses.replace(EVERY_LAYER, checkpoint_every=1, attention_groups=2)
    model = tiny_model("llama", attention="sdpa")
    plain = copy.deepcopy(model)
    plain(**unpadded(0)).loss.backward()
    with attach(model, config) as offloader:
        groups = offloader.attention_groups
        assert groups is not None
        for other in (4, "off", 2):
            model.zero_grad()
            loss = model(**unpadded(0)).loss
            groups.set_groups(other)
            with Kernels() as seen:
                loss.backward()
            assert_same_tensors(gradients_of(model), gradients_of(plain), "")
            assert len(seen.shapes) in (NUM_LAYERS, 2 * NUM_LAYERS, 4 * NUM_LAYERS)


def test_a_plan_may_switch_them() -> None:
    """Where they were not given; policy "auto" begins without."""
    model = tiny_model("llama", attention="sdpa")
    expected = train(copy.deepcopy(model), STEP * 3)
    seen_heads = []
    with attach(model, PyAOConfig(policy="auto")) as offloader, Kernels() as seen:
        switch = offloader._deciding.switch
        assert switch.levers == Levers()
        settings: list[int | str] = [4, "off"]

        def between() -> None:
            seen_heads.append(set(seen.shapes))
            seen.shapes.clear()
            switch.set(Levers(attention_groups=settings.pop(0) if settings else "off"))

        assert_same_trajectory(train(model, STEP * 3, between=between), expected)
    assert seen_heads == [{(2, 4)}, {(1, 2)}, {(2, 4)}][: len(seen_heads)]
    assert len(seen_heads) >= 2


def test_copies_and_pickles_are_plain() -> None:
    model = tiny_model("llama", attention="sdpa")
    with attach(model, GROUPS):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with Kernels() as seen:
                train(other, STEP)
            assert set(seen.shapes) == {(2, 4)}


# ---- what is left to torch ----------------------------------------------------------------------


def attention(layer: FunctionLayer, x: Tensor, **options: Any) -> Tensor:
    q = (x @ layer.weight).view(2, 6, 2, 4).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, q * 2, torch.sin(q), **options)
    return x + out.transpose(1, 2).reshape(2, 6, 8)


def step(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    model(torch.linspace(-1, 1, 96).view(2, 6, 8)).square().sum().backward()
    return {"drawn": torch.rand(1), **gradients_of(model)}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attn_mask": torch.ones(6, 6).tril().bool()}, "a mask is given"),
        ({"dropout_p": 0.3}, "torch chooses MATH"),
    ],
)
def test_calls_that_are_left_alone(
    options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hf_pyao")
    model = Stack(*[lambda layer, x: attention(layer, x, **options)] * 3, size=8)
    expected = step(copy.deepcopy(model))
    with attach(model, dataclasses.replace(EVERY_LAYER, attention_groups=2)) as offloader:
        assert_same_tensors(step(model), expected, "")
        assert offloader.attention_groups is not None
        assert reason in offloader.attention_groups.describe()
        assert offloader.attention_groups.last_plan is None
    assert caplog.text.count(reason) == 1


def test_layers_without_an_attention_module_are_seen_whole() -> None:
    model = Stack(attention, attention, size=8)
    expected = step(copy.deepcopy(model))
    with attach(model, GROUPS), Kernels() as seen:
        assert_same_tensors(step(model), expected, "")
    assert set(seen.shapes) == {(1, 2)}


def test_eager_attention_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hf_pyao")
    model = tiny_model("llama", attention="eager")
    with attach(model, GROUPS) as offloader:
        train(model)
        assert offloader.attention_groups is not None
        assert "'eager', not 'sdpa'" in offloader.attention_groups.describe()
    assert caplog.text.count("'eager', not 'sdpa'") == 1


def test_evaluation_and_generation_run_torchs_own_call() -> None:
    model = tiny_model("llama", attention="sdpa")
    with attach(model, GROUPS), torch.no_grad(), Kernels() as seen:
        model(**unpadded(0))
    assert set(seen.shapes) == {(2, 4)}


def test_functorch_runs_torchs_own_call() -> None:
    model = tiny_model("llama", attention="sdpa")
    parameters = dict(model.named_parameters())
    batch = unpadded(0)

    def loss_of(values: dict[str, Tensor]) -> Tensor:
        loss: Tensor = torch.func.functional_call(model, values, kwargs=batch).loss
        return loss

    expected = torch.func.grad(loss_of)(parameters)
    with attach(model, GROUPS):
        assert_same_tensors(torch.func.grad(loss_of)(parameters), expected, "")


def test_a_failure_leaves_no_mode() -> None:
    calls: list[int] = []

    def function(layer: FunctionLayer, x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) in (2, 5):  # in forward, and as a layer runs again
            raise ValueError("here")
        return attention(layer, x)

    model = Stack(function, function, size=8)
    config = dataclasses.replace(EVERY_LAYER, checkpoint_every=1, attention_groups=2)
    with attach(model, config):
        for _ in range(2):
            with pytest.raises(ValueError, match="here"):
                model(torch.ones(2, 6, 8)).sum().backward()
            assert not torch.overrides._get_current_function_mode_stack()
