"""Tiny models of every kind of head, and what their own loss gives."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB, HIDDEN = 131, 32

_GATED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "opt": {  # tied
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "word_embed_proj_dim": HIDDEN,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "dropout": 0.0,
    },
    "gpt2": _GPT,  # tied
    "llama": _GATED,
    "gemma2": {  # soft-cap, tied
        **_GATED,
        "head_dim": 8,
        "final_logit_softcapping": 5.0,
        "attn_implementation": "eager",
    },
    "gemma3_text": {**_GATED, "head_dim": 8, "final_logit_softcapping": 5.0},
    "cohere": {**_GATED, "logit_scale": 0.3},  # scale, tied
    "granite": {**_GATED, "logits_scaling": 3.0},  # division
    "phi": {**_GATED, "num_key_value_heads": 4},  # bias
    "gptj": {**_GPT, "rotary_dim": 4},  # bias
    "qwen2": {**_GATED, "tie_word_embeddings": True},
    "falcon": {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
}


def make_model(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """Build a tiny causal LM in training mode whose logits are of the order of 1."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**CONFIGS[name], **options})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).train()
    if dtype != torch.get_default_dtype():  # fake parameters cannot be converted
        model = model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def make_batch(num_samples: int = 3, num_tokens: int = 17, seed: int = 0) -> dict[str, Tensor]:
    """Return ids and labels, the start of the first sample ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (num_samples, num_tokens), generator=generator)
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by parameter name."""
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def assert_same_step(
    mine: nn.Module, own: nn.Module, tolerance: float, **batch: Any
) -> tuple[Any, Any]:
    """Run one forward and backward of both and compare; return both outputs.

    Gradients are compared on the scale of the largest one: some are zero but for rounding.
    """
    outputs = [model(**batch) for model in (mine, own)]
    for output in outputs:
        output.loss.backward()
    torch.testing.assert_close(outputs[0].loss, outputs[1].loss, rtol=tolerance, atol=0)
    got, expected = gradients(mine), gradients(own)
    assert got.keys() == expected.keys()
    scale = max(float(grad.abs().max()) for grad in expected.values())
    for name, grad in expected.items():
        torch.testing.assert_close(
            got[name],
            grad,
            rtol=tolerance,
            atol=tolerance * scale,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    return outputs[0], outputs[1]


def pair(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """Return a model and an equal one."""
    own = make_model(name, dtype, **options)
    return copy.deepcopy(own), own
