"""What the roles of architectures are: written out by hand, from their sources.

Paths are relative to a layer. ``FIRST`` has the encoder's or the dense layer's, ``LAST`` what the
last layer has instead: a decoder, experts.
"""

from __future__ import annotations

Roles = dict[str, set[str]]

_SEPARATE = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
_ATTENTION: Roles = {
    "qkv_linear": _SEPARATE,
    "core_attn": {"self_attn"},
    "attn_proj": {"self_attn.o_proj"},
}
_NORMS: Roles = {"attn_norm": {"input_layernorm"}, "mlp_norm": {"post_attention_layernorm"}}
_GATED_MLP: Roles = {
    "mlp_up": {"mlp.gate_proj", "mlp.up_proj"},
    "mlp_act": {"mlp", "mlp.act_fn"},
    "mlp_down": {"mlp.down_proj"},
}
_FUSED_EXPERTS: Roles = {
    "router": {"mlp", "mlp.gate"},
    "experts": {"mlp.experts"},
    "moe_act": {"mlp.experts.act_fn"},
}
_FOUR_NORMS: Roles = {
    "attn_norm": {"input_layernorm", "post_attention_layernorm"},
    "mlp_norm": {"pre_feedforward_layernorm", "post_feedforward_layernorm"},
}
_BLOOM: Roles = {
    "attn_norm": {"input_layernorm"},
    "qkv_linear": {"self_attention.query_key_value"},
    "core_attn": {"self_attention"},
    "attn_proj": {"self_attention.dense"},
    "mlp_up": {"mlp.dense_h_to_4h"},
    "mlp_act": {"mlp", "mlp.gelu_impl"},
    "mlp_down": {"mlp.dense_4h_to_h"},
}
_BERT: Roles = {
    "attn_norm": {"attention.output.LayerNorm"},
    "qkv_linear": {"attention.self.query", "attention.self.key", "attention.self.value"},
    "core_attn": {"attention.self"},
    "attn_proj": {"attention.output.dense", "attention.output.dropout"},
    "mlp_norm": {"output.LayerNorm"},
    "mlp_up": {"intermediate.dense"},
    "mlp_act": {"intermediate", "intermediate.intermediate_act_fn"},
    "mlp_down": {"output.dense", "output.dropout"},
}
_DEEPSEEK: Roles = {
    **_NORMS,
    "qkv_linear": {
        *("self_attn.q_a_proj", "self_attn.q_b_proj"),
        *("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"),
    },
    "core_attn": {"self_attn"},
    "attn_proj": {"self_attn.o_proj"},
}
_BART: Roles = {
    "attn_norm": {"self_attn_layer_norm"},
    "qkv_linear": _SEPARATE,
    "core_attn": {"self_attn"},
    "attn_proj": {"self_attn.out_proj"},
    "mlp_norm": {"final_layer_norm"},
    "mlp_up": {"fc1"},
    "mlp_act": {"activation_fn"},
    "mlp_down": {"fc2"},
}

_LLAMA: Roles = {**_ATTENTION, **_NORMS, **_GATED_MLP}
_GPT2: Roles = {
    "attn_norm": {"ln_1"},
    "qkv_linear": {"attn.c_attn"},
    "core_attn": {"attn"},
    "attn_proj": {"attn.c_proj", "attn.resid_dropout"},
    "mlp_norm": {"ln_2"},
    "mlp_up": {"mlp.c_fc"},
    "mlp_act": {"mlp", "mlp.act"},
    "mlp_down": {"mlp.c_proj", "mlp.dropout"},
}
GPT2_CROSS: Roles = {
    **_GPT2,
    "attn_norm": {"ln_1", "ln_cross_attn"},
    "qkv_linear": {"attn.c_attn", "crossattention.c_attn", "crossattention.q_attn"},
    "core_attn": {"attn", "crossattention"},
    "attn_proj": {
        *("attn.c_proj", "attn.resid_dropout"),
        *("crossattention.c_proj", "crossattention.resid_dropout"),
    },
}
"""GPT-2 with ``add_cross_attention``."""

FIRST: dict[str, Roles] = {
    **dict.fromkeys(("gemma", "granite", "llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    "bart": _BART,
    "bert": _BERT,
    "bloom": {**_BLOOM, "mlp_norm": {"post_attention_layernorm"}},
    "cohere": {**_ATTENTION, **_GATED_MLP, "attn_norm": {"input_layernorm"}},
    "deepseek_v3": {**_DEEPSEEK, **_GATED_MLP},
    "falcon": {**_BLOOM, "mlp_act": {"mlp", "mlp.act"}},
    "gemma2": {**_FOUR_NORMS, **_ATTENTION, **_GATED_MLP},
    "gemma3_text": {**_FOUR_NORMS, **_ATTENTION, **_GATED_MLP},
    "glm4": {
        **_ATTENTION,
        "attn_norm": {"input_layernorm", "post_self_attn_layernorm"},
        "mlp_norm": {"post_attention_layernorm", "post_mlp_layernorm"},
        "mlp_up": {"mlp.gate_up_proj"},
        "mlp_act": {"mlp", "mlp.activation_fn"},
        "mlp_down": {"mlp.down_proj"},
    },
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": {
        **_NORMS,
        "qkv_linear": {"attention.query_key_value"},
        "core_attn": {"attention"},
        "attn_proj": {"attention.dense", "post_attention_dropout"},
        "mlp_up": {"mlp.dense_h_to_4h"},
        "mlp_act": {"mlp", "mlp.act"},
        "mlp_down": {"mlp.dense_4h_to_h", "post_mlp_dropout"},
    },
    "gptj": {
        "attn_norm": {"ln_1"},
        "qkv_linear": {"attn.q_proj", "attn.k_proj", "attn.v_proj"},
        "core_attn": {"attn"},
        "attn_proj": {"attn.out_proj", "attn.resid_dropout"},
        "mlp_up": {"mlp.fc_in"},
        "mlp_act": {"mlp", "mlp.act"},
        "mlp_down": {"mlp.fc_out", "mlp.dropout"},
    },
    "granitemoe": {
        **_ATTENTION,
        **_NORMS,
        "router": {"block_sparse_moe", "block_sparse_moe.router"},
        "experts": {"block_sparse_moe.experts"},
        "moe_act": {"block_sparse_moe.experts.act_fn"},
    },
    "jamba": {  # its first layer is a state-space one, whose parts have no roles
        **_GATED_MLP,
        "mlp_norm": {"pre_ff_layernorm"},
        "mlp_up": {"feed_forward.gate_proj", "feed_forward.up_proj"},
        "mlp_act": {"feed_forward", "feed_forward.act_fn"},
        "mlp_down": {"feed_forward.down_proj"},
    },
    "mixtral": {**_ATTENTION, **_NORMS, **_FUSED_EXPERTS},
    "mpt": {
        "attn_norm": {"norm_1"},
        "qkv_linear": {"attn.Wqkv"},
        "core_attn": {"attn"},
        "attn_proj": {"attn.out_proj", "resid_attn_dropout"},
        "mlp_norm": {"norm_2"},
        "mlp_up": {"ffn.up_proj"},
        "mlp_act": {"ffn", "ffn.act"},
        "mlp_down": {"ffn.down_proj"},
    },
    "olmo2": {
        **_ATTENTION,
        **_GATED_MLP,
        "attn_norm": {"post_attention_layernorm"},
        "mlp_norm": {"post_feedforward_layernorm"},
    },
    "opt": _BART,
    "phi3": {
        **_NORMS,
        "qkv_linear": {"self_attn.qkv_proj"},
        "core_attn": {"self_attn"},
        "attn_proj": {"self_attn.o_proj", "resid_attn_dropout"},
        "mlp_up": {"mlp.gate_up_proj"},
        "mlp_act": {"mlp", "mlp.activation_fn"},
        "mlp_down": {"mlp.down_proj", "resid_mlp_dropout"},
    },
    "phi": {
        **_ATTENTION,
        "attn_norm": {"input_layernorm"},
        "attn_proj": {"self_attn.dense"},
        "mlp_up": {"mlp.fc1"},
        "mlp_act": {"mlp", "mlp.activation_fn"},
        "mlp_down": {"mlp.fc2"},
    },
    "qwen2_moe": {
        **_ATTENTION,
        **_NORMS,
        **_FUSED_EXPERTS,
        "router": {"mlp", "mlp.gate", "mlp.shared_expert_gate"},
        "mlp_up": {"mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"},
        "mlp_act": {"mlp.shared_expert", "mlp.shared_expert.act_fn"},
        "mlp_down": {"mlp.shared_expert.down_proj"},
    },
    "qwen3_moe": {**_ATTENTION, **_NORMS, **_FUSED_EXPERTS},
    "stablelm": _LLAMA,
    "starcoder2": {
        **_ATTENTION,
        **_NORMS,
        "mlp_up": {"mlp.c_fc"},
        "mlp_act": {"mlp", "mlp.act"},
        "mlp_down": {"mlp.c_proj"},
    },
    "t5": {
        "attn_norm": {"layer.0.layer_norm"},
        "qkv_linear": {f"layer.0.SelfAttention.{name}" for name in "qkv"},
        "core_attn": {"layer.0.SelfAttention"},
        "attn_proj": {"layer.0.SelfAttention.o", "layer.0.dropout"},
        "mlp_norm": {"layer.1.layer_norm"},
        "mlp_up": {"layer.1.DenseReluDense.wi_0", "layer.1.DenseReluDense.wi_1"},
        "mlp_act": {"layer.1.DenseReluDense", "layer.1.DenseReluDense.act"},
        "mlp_down": {"layer.1.DenseReluDense.wo", "layer.1.dropout"},
    },
    "vit": {
        "attn_norm": {"layernorm_before"},
        "qkv_linear": {"attention.q_proj", "attention.k_proj", "attention.v_proj"},
        "core_attn": {"attention"},
        "attn_proj": {"attention.o_proj"},
        "mlp_norm": {"layernorm_after"},
        "mlp_up": {"mlp.fc1"},
        "mlp_act": {"mlp", "mlp.activation_fn"},
        "mlp_down": {"mlp.fc2"},
    },
}
"""Model type -> the roles of the first layer."""

LAST: dict[str, Roles] = {
    "bart": {
        **_BART,
        "attn_norm": {"self_attn_layer_norm", "encoder_attn_layer_norm"},
        "qkv_linear": {
            *_SEPARATE,
            *("encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj"),
        },
        "core_attn": {"self_attn", "encoder_attn"},
        "attn_proj": {"self_attn.out_proj", "encoder_attn.out_proj"},
    },
    "deepseek_v3": {
        **_DEEPSEEK,
        **_FUSED_EXPERTS,
        "mlp_up": {"mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"},
        "mlp_act": {"mlp.shared_experts", "mlp.shared_experts.act_fn"},
        "mlp_down": {"mlp.shared_experts.down_proj"},
    },
    "jamba": {
        **_ATTENTION,
        "attn_norm": {"input_layernorm"},
        "mlp_norm": {"pre_ff_layernorm"},
        "router": {"feed_forward", "feed_forward.router"},
        "experts": {"feed_forward.experts"},
        "moe_act": {"feed_forward.experts.act_fn"},
    },
    "t5": {
        "attn_norm": {"layer.0.layer_norm", "layer.1.layer_norm"},
        "qkv_linear": {
            *(f"layer.0.SelfAttention.{name}" for name in "qkv"),
            *(f"layer.1.EncDecAttention.{name}" for name in "qkv"),
        },
        "core_attn": {"layer.0.SelfAttention", "layer.1.EncDecAttention"},
        "attn_proj": {
            *("layer.0.SelfAttention.o", "layer.0.dropout"),
            *("layer.1.EncDecAttention.o", "layer.1.dropout"),
        },
        "mlp_norm": {"layer.2.layer_norm"},
        "mlp_up": {"layer.2.DenseReluDense.wi_0", "layer.2.DenseReluDense.wi_1"},
        "mlp_act": {"layer.2.DenseReluDense", "layer.2.DenseReluDense.act"},
        "mlp_down": {"layer.2.DenseReluDense.wo", "layer.2.dropout"},
    },
}
"""Model type -> the roles of the last layer, where they are others."""

BEFORE_5: dict[str, Roles] = {
    "mixtral": {
        **_ATTENTION,
        **_NORMS,
        "router": {"block_sparse_moe", "block_sparse_moe.gate"},
        "expert_fc1": {f"block_sparse_moe.experts.{i}.w{w}" for i in range(2) for w in (1, 3)},
        "moe_act": {
            *("block_sparse_moe.experts.0", "block_sparse_moe.experts.0.act_fn"),
            *("block_sparse_moe.experts.1", "block_sparse_moe.experts.1.act_fn"),
        },
        "expert_fc2": {f"block_sparse_moe.experts.{i}.w2" for i in range(2)},
    },
    "vit": {
        **_BERT,
        "attn_norm": {"layernorm_before"},
        "qkv_linear": {f"attention.attention.{name}" for name in ("query", "key", "value")},
        "core_attn": {"attention.attention"},
        "mlp_norm": {"layernorm_after"},
    },
}
"""Model type -> the roles of all layers before transformers 5."""

SINCE_5 = {"deepseek_v3", "granitemoe", "jamba", "qwen2_moe", "qwen3_moe"}
"""Others that had a list of experts before transformers 5, and are tested from there on."""
