"""Tiny models of the architectures whose layers and roles are tested, from configurations."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

HIDDEN, INTERMEDIATE, HEADS, VOCAB = 32, 48, 4, 64

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE: dict[str, Any] = {
    **COMMON,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
}
GATED: dict[str, Any] = {**WIDE, "num_key_value_heads": 2}
HEAD_DIM: dict[str, Any] = {**GATED, "head_dim": 8}
EXPERTS: dict[str, Any] = {
    **GATED,
    "num_experts_per_tok": 1,
    "num_experts": 2,
    "num_local_experts": 2,
    "moe_intermediate_size": INTERMEDIATE,
}
GPT: dict[str, Any] = {
    **{key: COMMON[key] for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")},
    "n_positions": 32,
    "n_embd": HIDDEN,
    "n_layer": 2,
    "n_head": HEADS,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bart": COMMON
    | {
        "d_model": HIDDEN,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": INTERMEDIATE,
        "decoder_ffn_dim": INTERMEDIATE,
        "decoder_start_token_id": 2,
    },
    "bert": WIDE,
    "bloom": {"vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layer": 2, "n_head": HEADS},
    "cohere": GATED,
    "deepseek_v3": EXPERTS
    | {
        "num_key_value_heads": HEADS,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
    },
    "falcon": {key: WIDE[key] for key in WIDE if key != "intermediate_size"},
    "gemma": HEAD_DIM,
    "gemma2": HEAD_DIM,
    "gemma3_text": HEAD_DIM,
    "glm4": HEAD_DIM,
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": WIDE,
    "gptj": GPT | {"rotary_dim": 4},
    "granite": GATED,
    "granitemoe": EXPERTS,
    "jamba": EXPERTS
    | {
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "llama": GATED,
    "mistral": HEAD_DIM,
    "mixtral": EXPERTS,
    "mpt": {"vocab_size": VOCAB, "d_model": HIDDEN, "n_layers": 2, "n_heads": HEADS},
    "olmo2": GATED,
    "opt": {key: WIDE[key] for key in WIDE if key != "intermediate_size"}
    | {"word_embed_proj_dim": HIDDEN, "ffn_dim": INTERMEDIATE},
    "phi": WIDE,
    "phi3": GATED,
    "qwen2": GATED,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": INTERMEDIATE},
    "qwen3": HEAD_DIM,
    "qwen3_moe": EXPERTS | {"head_dim": 8},
    "stablelm": GATED,
    "starcoder2": GATED,
    "t5": {
        "vocab_size": VOCAB,
        "d_model": HIDDEN,
        "d_kv": 8,
        "d_ff": INTERMEDIATE,
        "num_layers": 2,
        "num_heads": HEADS,
        "decoder_start_token_id": 0,
        "feed_forward_proj": "gated-gelu",
    },
    "vit": {key: WIDE[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    | {"num_attention_heads": HEADS, "image_size": 16, "patch_size": 8},
}
AUTO = {
    "bart": "AutoModelForSeq2SeqLM",
    "bert": "AutoModelForMaskedLM",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
}


def build(model_type: str, **settings: Any) -> nn.Module:
    """Return the same model every time, to be trained."""
    config = transformers.AutoConfig.for_model(model_type, **{**CONFIGS[model_type], **settings})
    torch.manual_seed(0)
    auto = getattr(transformers, AUTO.get(model_type, "AutoModelForCausalLM"))
    model: nn.Module = auto.from_config(config).train()
    return model
