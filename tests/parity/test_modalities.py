"""Encoders, vision, speech and diffusion: found without a word, or named, and bit-identical."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from hf_pyao import PyAOConfig, attach
from tests.helpers import EVERYTHING, assert_same_tensors, gradients_of

Batch = dict[str, torch.Tensor]


class ResnetBlock(nn.Module):
    """Convolutions, told the time, around an identity."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.time = nn.Linear(8, channels_out)
        self.dropout = nn.Dropout(0.1)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Return (batch, channels_out, height, width)."""
        h = self.conv1(nn.functional.silu(self.norm(x)))
        h = h + self.time(nn.functional.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(self.dropout(nn.functional.silu(h)))


class TinyUNet(nn.Module):
    """A UNet as diffusers builds it: skip connections, and ``mid_block`` registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.time_embedding = nn.Linear(1, 8)
        self.conv_in = nn.Conv2d(3, 4, 3, padding=1)
        self.down_blocks = nn.ModuleList([ResnetBlock(4, 8), ResnetBlock(8, 16)])
        self.up_blocks = nn.ModuleList([ResnetBlock(32, 8), ResnetBlock(16, 4)])
        self.mid_block = ResnetBlock(16, 16)
        self.conv_out = nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, noise: torch.Tensor) -> Any:
        """Return the loss, in an object like transformers'."""
        time = self.time_embedding(timestep)
        x = self.conv_in(sample)
        skips = []
        for block in self.down_blocks:
            x = block(x, time)
            skips.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        x = self.mid_block(x, time)
        for block in self.up_blocks:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], dim=1), time)
        predicted = self.conv_out(x)
        return Output(loss=nn.functional.mse_loss(predicted, noise))


@dataclasses.dataclass
class Output:
    loss: torch.Tensor


def bert() -> tuple[nn.Module, Batch]:
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    ids = torch.randint(3, 64, (2, 12))
    return BertForMaskedLM(config), {"input_ids": ids, "labels": ids}


def vit() -> tuple[nn.Module, Batch]:
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.1,
    )
    batch = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 4])}
    return ViTForImageClassification(config), batch


def whisper() -> tuple[nn.Module, Batch]:
    config = WhisperConfig(
        vocab_size=64,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.1,
    )
    batch = {"input_features": torch.randn(2, 8, 32), "labels": torch.randint(3, 64, (2, 10))}
    return WhisperForConditionalGeneration(config), batch


def unet() -> tuple[nn.Module, Batch]:
    batch = {
        "sample": torch.randn(2, 3, 16, 16),
        "timestep": torch.rand(2, 1),
        "noise": torch.randn(2, 3, 16, 16),
    }
    return TinyUNet(), batch


UNET_LAYERS = ("down_blocks.*", "mid_block", "up_blocks.*")

CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Batch]], tuple[str, ...], list[str]]] = {
    "bert": (bert, (), [f"bert.encoder.layer.{i}" for i in range(3)]),
    "vit": (vit, (), []),
    "whisper": (
        whisper,
        (),
        [f"model.{part}.layers.{i}" for part in ("encoder", "decoder") for i in range(2)],
    ),
    "diffusion UNet": (
        unet,
        UNET_LAYERS,
        ["down_blocks.0", "down_blocks.1", "mid_block", "up_blocks.0", "up_blocks.1"],
    ),
}
"""Name -> how to make model and batch, ``PyAOConfig.layers``, and the layers (vit: a list whose
name depends on the release)."""


def train(model: nn.Module, batch: Batch) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Train two steps of two micro-batches; return the losses, the last gradients, parameters."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss.detach().clone())
        seen = gradients_of(model)
        optimizer.step()
    seen.update({f"parameter {n}": p.detach().clone() for n, p in model.named_parameters()})
    return losses, seen


@pytest.mark.parametrize("name", CASES)
def test_training_is_bitwise_the_same(name: str) -> None:
    make, layers, expected_names = CASES[name]
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    expected_losses, expected = train(copy.deepcopy(model), batch)
    with attach(model, dataclasses.replace(EVERYTHING, layers=layers)) as offloader:
        losses, found = train(model, batch)
        totals = offloader.totals()
        names = list(offloader.layer_names)
        assert len(names) == 3 if name == "vit" else names == expected_names
    assert losses == expected_losses
    assert_same_tensors(found, expected, name)
    assert totals["num_micro_batches"] == 4
    assert totals["offloaded_bytes"] > totals["held_bytes"] > 0
    assert totals["reloaded_bytes"] == totals["offloaded_bytes"]


def test_the_last_of_named_layers_is_the_last_of_the_list_in_the_configuration() -> None:
    """Not of the registration, in which diffusers' models have ``mid_block`` last."""
    kept = {}
    for order in (UNET_LAYERS, ("down_blocks.*", "up_blocks.*", "mid_block")):
        torch.manual_seed(0)
        model, batch = unet()
        with attach(model, dataclasses.replace(EVERYTHING, layers=order)) as offloader:
            model(**batch).loss.backward()
            kept[order] = offloader.metrics()["kept_bytes/last layer"]
    # The last up block saves at 16 x 16, the middle block at 4 x 4.
    assert kept[UNET_LAYERS] > 4 * kept["down_blocks.*", "up_blocks.*", "mid_block"] > 0


@pytest.mark.parametrize("min_bytes", [0, 2**30])
def test_any_order_of_named_layers_is_right_and_counted_whole(min_bytes: int) -> None:
    torch.manual_seed(0)
    model, batch = unet()
    model.train()
    expected_losses, expected = train(copy.deepcopy(model), batch)
    would_hold = []
    for layers in (UNET_LAYERS, ("up_blocks.*", "mid_block", "down_blocks.*")):
        ours = copy.deepcopy(model)
        config = PyAOConfig(policy="all", layers=layers, min_bytes=min_bytes, host_memory_gib=0.1)
        with attach(ours, config) as offloader:
            losses, found = train(ours, batch)
            totals = offloader.totals()
        assert losses == expected_losses
        assert_same_tensors(found, expected, f"{layers}")
        assert totals["num_micro_batches"] == 4
        assert totals["held_bytes"] + totals["offloaded_bytes"] == totals["would_hold_bytes"]
        would_hold.append(totals["would_hold_bytes"])
    assert would_hold[0] == would_hold[1]
