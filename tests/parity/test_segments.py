"""Segments change no bit: architectures, lengths, precisions, tuning, dropout, accumulation."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.transfer.layout import Stays
from tests.helpers import (
    ARCHITECTURES,
    ENCODER_DECODERS,
    EVERY_LAYER,
    HIDDEN,
    NUM_LAYERS,
    assert_same_tensors,
    assert_same_trajectory,
    gradients_of,
    tiny_batch,
    tiny_model,
    train,
)
from tests.parity.test_modalities import bert, unet, vit, whisper

STEPS = tuple((tiny_batch(seed, length=8 + 2 * seed, padding=2),) for seed in range(2))
LENGTHS = (1, 2, 3, 100)
OTHERS = {"bert": bert, "vit": vit, "whisper": whisper, "unet": unet}
UNET = ("down_blocks.*", "mid_block", "up_blocks.*")


def segments(length: int, **settings: Any) -> PyAOConfig:
    return dataclasses.replace(EVERY_LAYER, checkpoint_every=length, **settings)


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_every_architecture_with_every_length(model_type: str) -> None:
    model = tiny_model(model_type, dropout=0.1)
    expected = train(copy.deepcopy(model), STEPS)
    counted = copy.deepcopy(model)
    with attach(counted, dataclasses.replace(EVERY_LAYER, policy="off")) as offloader:
        train(counted, STEPS)
        would_hold_bytes = offloader.totals()["would_hold_bytes"]
    num_stacks = 2 if model_type in ENCODER_DECODERS else 1
    num_layers = 4 if model_type in ENCODER_DECODERS else NUM_LAYERS
    for length, is_nested in (*((length, False) for length in LENGTHS), (2, True), (100, True)):
        ours = copy.deepcopy(model)
        with attach(ours, segments(length, checkpoint_nested=is_nested)) as offloader:
            where = f"{model_type}, {length}, nested: {is_nested}"
            assert_same_trajectory(train(ours, STEPS), expected, where)
            num_segments = num_stacks * -(-num_layers // num_stacks // length)
            totals = offloader.totals()
            assert totals["num_slots"] == num_segments
            assert totals["offloaded_bytes"] == totals["reloaded_bytes"] > 0
            assert totals["would_hold_bytes"] == would_hold_bytes
            assert offloader.host_pool.settle() == 0


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_encoders_vision_speech_and_diffusion(name: str) -> None:
    torch.manual_seed(0)
    model, batch = OTHERS[name]()
    model.train()
    settings: dict[str, Any] = {"layers": UNET} if name == "unet" else {}

    def step(model: nn.Module) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        loss = model(**batch).loss
        loss.backward()
        return {"loss": loss.detach(), "drawn after": torch.rand(2), **gradients_of(model)}

    expected = step(copy.deepcopy(model))
    for length, is_nested in (*((length, False) for length in LENGTHS), (3, True)):
        ours = copy.deepcopy(model)
        config = segments(length, checkpoint_nested=is_nested, **settings)
        with attach(ours, config) as offloader:
            assert_same_tensors(step(ours), expected, f"{name}, {length}, nested: {is_nested}")
            assert offloader.metrics()["offloaded_bytes"] > 0


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is depre:FutureWarning")  # peft
@pytest.mark.parametrize(
    ("length", "is_nested"), [(1, False), (2, False), (2, True)], ids=["1", "2", "2 nested"]
)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("tuning", ["full", "lora", "frozen below"])
def test_precision_and_tuning(
    tuning: str, autocast: torch.dtype | None, attention: str, length: int, is_nested: bool
) -> None:
    model: Any = tiny_model("llama", attention=attention, dropout=0.1)
    if tuning == "lora":
        model = get_peft_model(
            model, LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "down_proj"])
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first, and so would be the gradients behind it
                nn.init.normal_(parameter)
    elif tuning == "frozen below":
        for each in (model.model.embed_tokens, model.model.layers[0]):
            each.requires_grad_(False)
    expected = train(copy.deepcopy(model), autocast=autocast)
    with attach(model, segments(length, checkpoint_nested=is_nested)) as offloader:
        assert_same_trajectory(train(model, autocast=autocast), expected)
        num_layers = NUM_LAYERS - (tuning == "frozen below")
        assert offloader.totals()["num_slots"] == -(-num_layers // length)


@pytest.mark.parametrize("policy", ["all", "auto", "budget", "off"])
def test_with_every_policy(policy: str) -> None:
    settings: dict[str, Any] = {"budget": 1} if policy == "budget" else {}
    config = PyAOConfig(
        policy=policy,
        min_bytes=0,
        keep_last_layers=0,
        host_memory_gib=0.1,
        checkpoint_every=2,
        profile_steps=1,
        **settings,
    )
    model = tiny_model("llama", dropout=0.1)
    expected = train(copy.deepcopy(model))
    with attach(model, config) as offloader:
        assert_same_trajectory(train(model), expected, policy)
        if policy == "off":
            assert offloader.totals()["offloaded_bytes"] == 0
            metrics = offloader.metrics()
            shared_bytes = metrics[f"kept_bytes/{Stays.SHARED}"]
            assert shared_bytes == 2 * 8 * (HIDDEN // 4) * 4  # cosines and sines for 8 positions
            assert metrics["held_bytes"] - shared_bytes == 2 * 2 * 8 * HIDDEN * 4
        assert "of every 2 layers one input is saved" in offloader.describe()


def test_the_chunked_loss_on_top() -> None:
    model = tiny_model("llama")
    plain = copy.deepcopy(model)
    chunked = dataclasses.replace(EVERY_LAYER, head_loss="chunked")
    with attach(plain, chunked):
        expected = train(plain)
    with attach(model, dataclasses.replace(chunked, checkpoint_every=2)):
        assert_same_trajectory(train(model), expected)


@pytest.mark.parametrize("kept", [1, 2])
def test_the_last_layers_segment_is_kept(kept: int) -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    nbytes = 2 * 8 * HIDDEN * 4
    with attach(model, segments(2, keep_last_layers=kept)) as offloader:
        train(model)
        assert offloader.metrics()["kept_bytes/last layer"] == nbytes
        assert offloader.metrics()["offloaded_bytes"] == nbytes
