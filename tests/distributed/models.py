"""Tiny models whose parameters are random throughout, so that each is known by its value."""

from __future__ import annotations

import copy
import functools
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from tests.distributed.scenarios import LAYER_CLASSES, NUM_FROZEN_LAYERS, NUM_LAYERS

HIDDEN = 32
VOCAB = 96
BATCH = 2
SEQUENCE = HIDDEN // BATCH
"""A flattened activation then has the shape of a weight, (32, 32): shapes alone tell nothing."""

LORA_TARGETS = {
    "opt": ["q_proj", "v_proj", "fc1"],
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj"],
}


def build_model(name: str, tuning: str, option: str) -> nn.Module:
    """Return a fresh model in training mode; equal arguments give equal weights on all ranks."""
    return copy.deepcopy(_prototype(name, tuning, option))


@functools.cache
def _prototype(name: str, tuning: str, option: str) -> nn.Module:
    torch.manual_seed(0)
    model: Any = _BUILDERS[name]()
    if tuning == "lora":
        model = _with_lora(model, name)
    elif tuning == "frozen_below":
        _freeze_lower_half(model, name)
    elif tuning == "frozen_inside":
        layers_of(model, name)[NUM_LAYERS // 2].requires_grad_(False)
    if option == "checkpointing":
        # transformers 5.23 renamed it, and warns on the old name.
        renamed = hasattr(model, "activation_checkpointing_enable")
        name_of_call = f"{'activation' if renamed else 'gradient'}_checkpointing_enable"
        getattr(model, name_of_call)()
    if option == "checkpoint_wrapper":
        model.config.use_cache = False  # recomputation would append to the cache once more
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2, generator=generator)
    model.train()
    return cast(nn.Module, model)


def layers_of(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the decoder layers, before or after wrapping."""
    wanted = LAYER_CLASSES[name]
    return [m for m in model.modules() if type(m).__name__ in (wanted, f"FSDP{wanted}")]


def batch_of(rank: int, index: int) -> dict[str, torch.Tensor]:
    """Return micro-batch *index* of *rank*: no two are equal."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    ids = torch.randint(VOCAB, (BATCH, SEQUENCE), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0  # with padding, an attention mask is saved by every layer
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def _opt() -> nn.Module:
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            word_embed_proj_dim=HIDDEN,
            ffn_dim=2 * HIDDEN,
            num_attention_heads=2,
            num_hidden_layers=NUM_LAYERS,
            max_position_embeddings=SEQUENCE,
            dropout=0.1,
            attention_dropout=0.0,
        )
    )


def _llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=NUM_LAYERS,
        )
    )


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=HIDDEN,
            n_inner=2 * HIDDEN,
            n_head=2,
            n_layer=NUM_LAYERS,
            n_positions=SEQUENCE,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


_BUILDERS = {"opt": _opt, "llama": _llama, "gpt2": _gpt2}


def _with_lora(model: nn.Module, name: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4,
        lora_dropout=0.1,
        target_modules=LORA_TARGETS[name],
        fan_in_fan_out=name == "gpt2",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def _freeze_lower_half(model: nn.Module, name: str) -> None:
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.requires_grad_(False)  # and with it the head, which is tied to it
    for layer in layers_of(model, name)[:NUM_FROZEN_LAYERS]:
        layer.requires_grad_(False)
