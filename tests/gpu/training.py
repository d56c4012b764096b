"""Small models that save enough to move, and training steps to compare bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.gpu.device import Device

HIDDEN = 128
NUM_LAYERS = 4
VOCAB = 512
DROPOUT = 0.1

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SETTINGS: dict[str, dict[str, Any]] = {
    "opt": {
        "hidden_size": HIDDEN,
        "word_embed_proj_dim": HIDDEN,
        "ffn_dim": 4 * HIDDEN,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "dropout": DROPOUT,
        "max_position_embeddings": 256,
    },
    "gpt2": {
        "n_embd": HIDDEN,
        "n_layer": NUM_LAYERS,
        "n_head": 4,
        "n_positions": 256,
        "resid_pdrop": DROPOUT,
        "embd_pdrop": DROPOUT,
        "attn_pdrop": 0.0,
    },
    "llama": {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    },
}
ARCHITECTURES = tuple(_SETTINGS)


def make_model(architecture: str, device: Device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a small causal LM in training mode; OPT and GPT-2 have dropout."""
    settings = {**_SETTINGS[architecture], **_TOKENS, "vocab_size": VOCAB}
    config = AutoConfig.for_model(architecture, **settings)
    config.use_cache = False
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to(device.torch_device).train()


def batch_of(device: Device, length: int, seed: int = 0, size: int = 4) -> dict[str, torch.Tensor]:
    """Return *size* random sequences of *length* tokens, as inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (size, length), generator=generator).to(device.torch_device)
    return {"input_ids": ids, "labels": ids}


@dataclass
class Outcome:
    """What training steps gave."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    rng_state: torch.Tensor

    def difference_from(self, other: Outcome) -> str | None:
        """Name the first thing that is not bit for bit the same; None if all is."""
        for step, (mine, theirs) in enumerate(zip(self.losses, other.losses, strict=True)):
            if not torch.equal(mine, theirs):
                return f"loss of step {step}: {mine.item()} and {theirs.item()}"
        for name, gradient in self.gradients.items():
            if not torch.equal(gradient, other.gradients[name]):
                return f"gradient of {name}"
        if not torch.equal(self.rng_state, other.rng_state):
            return "state of the random generator"
        return None


def train(
    model: nn.Module,
    device: Device,
    lengths: tuple[int, ...] = (64, 48, 64),
    before_step: Callable[[], None] = lambda: None,
) -> Outcome:
    """Accumulate gradients over one micro-batch of each length; return everything comparable."""
    model.zero_grad()
    torch.manual_seed(7)
    losses = []
    for step, length in enumerate(lengths):
        before_step()
        loss = model(**batch_of(device, length, seed=step)).loss
        loss.backward()
        losses.append(loss.detach())
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return Outcome(losses, gradients, device.rng_state())


def plain_outcome(model: nn.Module, device: Device, **options: Any) -> Outcome:
    """Return the outcome of a copy of *model* that never sees hf_pyao."""
    return train(copy.deepcopy(model), device, **options)
