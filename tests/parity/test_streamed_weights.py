"""Training with streamed weights equals plain training, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from tests.helpers import (
    ACCUMULATING,
    ARCHITECTURES,
    PRECISIONS,
    assert_same_trajectory,
    enable_checkpointing,
    train,
)
from tests.helpers.adapters import cast_base_, tiny_lora

STEPS = (*ACCUMULATING, *ACCUMULATING[:2])
"""Five steps, some of several micro-batches."""


CONFIGS: dict[str, dict[str, Any]] = {
    "all": {"policy": "all"},
    "nothing offloaded": {"policy": "off"},
    "auto": {"policy": "auto", "profile_steps": 1},
    "segments": {"policy": "all", "checkpoint_every": 2},
    "nested segments": {"policy": "all", "checkpoint_every": 2, "checkpoint_nested": True},
    "recomputed": {"policy": "all", "recompute_modules": ("pointwise",)},
    "long context": {"policy": "all", "long_context": True},
    "one layer stays": {"policy": "all", "stream_weights": 1},
    "window of a layer": {"policy": "all", "window": "layer", "keep_last_layers": 0},
    "no window": {"policy": "all", "window": 0},
}


def check(
    model: nn.Module,
    what: str,
    autocast: Any = None,
    **settings: Any,
) -> None:
    """Compare training of a copy with streamed weights with that of *model*, which never had any.

    Under autocast the base is in its dtype. With ``long_context`` MLPs run in tiles, whose products have other bits by right: the reference
    is then the same without streamed weights.
    """
    if autocast is not None:
        cast_base_(model, autocast)
    ours = copy.deepcopy(model)
    settings = {"stream_weights": 0, "min_bytes": 0, "host_memory_gib": 0.1, **settings}
    if settings.get("long_context"):
        resident = {name: value for name, value in settings.items() if name != "stream_weights"}
        with attach(model, PyAOConfig(**resident)):
            expected = train(model, STEPS, autocast=autocast)
    else:
        expected = train(model, STEPS, autocast=autocast)
    with attach(ours, PyAOConfig(**settings)) as offloader:
        found = train(ours, STEPS, autocast=autocast)
        assert offloader.weights is not None
        ring = offloader.weights.ring
        assert ring is not None
        assert ring.num_uploads > 0
    assert_same_trajectory(found, expected, what)
    assert ring.counts.num_left == 0, f"{what}: someone held a slot"
    for (name, p), q in zip(model.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, q), f"{what}: {name}"


@pytest.mark.sampled(every=11)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("config", CONFIGS)
def test_under_each_configuration(config: str, precision: str) -> None:
    dtype, autocast = PRECISIONS[precision]
    model = tiny_lora("llama", dtype=dtype, dropout=0.1, num_hidden_layers=4)
    check(model, f"{config}, {precision}", autocast, **CONFIGS[config])


@pytest.mark.sampled(every=13)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "autocast"])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_of_each_architecture(model_type: str, autocast: Any) -> None:
    model = tiny_lora(model_type, dropout=0.1)
    check(model, model_type, autocast, policy="all")


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "autocast"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_of_a_mixture_with_adapters_on_attention(model_type: str, autocast: Any) -> None:
    """Experts are streamed then, and autocast casts them one by one."""
    model = tiny_lora(model_type, adapters={"target_modules": ["q_proj", "v_proj"]})
    check(model, model_type, autocast, policy="all")


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "autocast"])
def test_with_gradient_checkpointing(use_reentrant: bool, autocast: Any) -> None:
    model = tiny_lora("llama", dropout=0.1, num_hidden_layers=4)
    inner: Any = model
    inner.enable_input_require_grads()
    enable_checkpointing(inner.base_model.model, use_reentrant=use_reentrant)
    check(model, f"checkpointing, {use_reentrant}", autocast, policy="all")


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "autocast"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_dora_reads_the_weights_of_another_module(model_type: str, autocast: Any) -> None:
    model = tiny_lora(model_type, adapters={"use_dora": True})
    check(model, f"DoRA, {model_type}", autocast, policy="all")


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("head_loss", ["off", "chunked"])
def test_with_trained_norms_and_the_chunked_loss(head_loss: str) -> None:
    model = tiny_lora("llama")
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.requires_grad_()
    check(model, head_loss, policy="all", head_loss=head_loss)
