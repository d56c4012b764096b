"""All levers for long sequences at once, against training without any."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_pyao import PyAOConfig, attach
from tests.helpers import (
    ARCHITECTURES,
    NUM_LAYERS,
    Batch,
    gradients_of,
    relative_errors,
    tiny_batch,
    tiny_model,
)

ALL = PyAOConfig(
    policy="all",
    min_bytes=0,
    keep_last_layers=0,
    host_memory_gib=0.1,
    long_context=True,
    mlp_tiles=3,
)

FUSED_EXPERTS = {"mixtral", "qwen3_moe"}


def gradients(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of one step."""
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), gradients_of(model)


def check(model: nn.Module, config: PyAOConfig, bound: float) -> dict[str, float]:
    """Compare a step with one without anything; return its metrics."""
    batch = tiny_batch(size=2, length=16)
    expected_loss, expected = gradients(copy.deepcopy(model), batch)
    with attach(model, config) as offloader:
        loss, found = gradients(model, batch)
        metrics = offloader.metrics()
        assert offloader.mlp_tiles is not None
        metrics |= offloader.mlp_tiles.metrics()
        said = offloader.describe()
    assert "the rest is computed again" in said
    assert "mlp_tiles=" in said
    assert abs(loss - expected_loss) <= bound * abs(expected_loss)
    errors = relative_errors(found, expected)
    assert max(errors.values()) <= bound, max(errors, key=lambda name: errors[name])
    return metrics


@pytest.mark.parametrize("model_type", sorted(set(ARCHITECTURES) - {"bart", "t5"}))
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.sampled(every=9)
def test_one_step(model_type: str, every: int) -> None:
    model = tiny_model(model_type)
    config = PyAOConfig.from_dict({**ALL.to_dict(), "checkpoint_every": every, "head_loss": "auto"})
    if model_type in FUSED_EXPERTS:  # whose grouped products take no float64
        metrics = check(model, config, 2e-6)
    else:
        metrics = check(model.double(), config, 1e-10)
        assert metrics["mlp_tiles_num_tiled"] == NUM_LAYERS
    assert metrics["offloaded_bytes"] > 0


@pytest.mark.thorough
def test_float32_and_what_leaves() -> None:
    """Of each layer the input leaves, and what attention returned; nothing else does."""
    model = tiny_model("llama")
    batch = tiny_batch(size=2, length=16)
    width = model.config.hidden_size
    with attach(model, ALL) as offloader:
        gradients(model, batch)
        offloaded = offloader.metrics()["offloaded_bytes"]
    hidden_bytes = 2 * 16 * width * 4
    statistics_bytes = 2 * 16 * model.config.num_attention_heads * 4
    assert NUM_LAYERS * hidden_bytes <= offloaded
    assert offloaded <= NUM_LAYERS * (2 * hidden_bytes + statistics_bytes + 64)
    assert check(model, ALL, 2e-6)["mlp_tiles_num_norms_tiled"] == 2 * NUM_LAYERS + 1


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["all", "auto", "off", "budget"])
def test_policies(policy: str) -> None:
    more: dict[str, Any] = {"budget": 2} if policy == "budget" else {}
    config = PyAOConfig.from_dict({**ALL.to_dict(), "policy": policy, **more})
    check(tiny_model("llama").double(), config, 1e-10)


@pytest.mark.thorough
@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is depre:FutureWarning"
)  # peft asks
def test_under_autocast_and_with_lora() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    lora = LoraConfig(
        r=4, target_modules=["up_proj", "down_proj", "q_proj"], init_lora_weights=False
    )
    model = get_peft_model(tiny_model("llama").double(), lora, autocast_adapter_dtype=False).train()
    check(model, ALL, 1e-10)
    plain = tiny_model("llama")
    batch = tiny_batch(size=2, length=16)
    with torch.autocast("cpu", torch.bfloat16):
        expected_loss, expected = gradients(copy.deepcopy(plain), batch)
        with attach(plain, ALL):
            loss, found = gradients(plain, batch)
    assert torch.allclose(loss, expected_loss, rtol=1e-2)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 2e-2 * gradient.norm(), name


def test_each_lever_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hf_pyao"):
        with attach(tiny_model("opt"), ALL):
            pass
    said = caplog.text
    for what in ("mlp_tiles=3", "chunked", "the input is saved", "what attention returns"):
        assert what in said, said
