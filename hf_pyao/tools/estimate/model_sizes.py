"""The shapes behind ``--model_size``: one frozen table for each architecture.

A published shape has the name, and to the parameter the size, of the model that it was published
as; its weights here are random. ``tiny``, ``mini`` and ``micro`` are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hf_pyao.errors import unknown_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DEFAULT_SIZE = "tiny"
PAPER_SIZES: Mapping[str, str] = MappingProxyType({"opt": "1.3b", "gpt2": "0.8b", "llama": "1.2b"})
"""Per architecture, the shape in the evaluation of the PyAO paper."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """One shape of one architecture."""

    summary: str
    """What the shape is, for ``--help``."""
    learning_rate: float
    """Peak learning rate to start from scratch with."""
    settings: Mapping[str, Any]
    """Arguments of the architecture's config class. Without ``vocab_size`` the model takes the
    tokenizer's; with it, it keeps its own, because the logits are a good part of its memory."""


def _opt(
    summary: str, rate: float, hidden: int, layers: int, heads: int, **settings: Any
) -> ModelSize:
    shape = {
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 2048,
    }
    return _size(summary, rate, {**shape, **settings})


def _gpt2(
    summary: str, rate: float, hidden: int, layers: int, heads: int, **settings: Any
) -> ModelSize:
    shape = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 1024}
    return _size(summary, rate, {**shape, **settings})


def _llama(
    summary: str,
    rate: float,
    hidden: int,
    mlp: int,
    layers: int,
    heads: tuple[int, int],
    **settings: Any,
) -> ModelSize:
    shape = {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    return _size(summary, rate, {**shape, **settings})


def _size(summary: str, rate: float, settings: dict[str, Any]) -> ModelSize:
    return ModelSize(summary=summary, learning_rate=rate, settings=MappingProxyType(settings))


def _llama_3(rope_factor: float) -> dict[str, Any]:
    # The older of two spellings of the rotary settings: every supported transformers reads it.
    return {
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "vocab_size": 128256,
    }


_OPT_VOCAB: dict[str, Any] = {"vocab_size": 50272}
_GPT2_VOCAB: dict[str, Any] = {"vocab_size": 50257}
# The small ones see each token at most a few times: dropout would only slow their learning.
_OPT_NO_DROPOUT: dict[str, Any] = {"dropout": 0.0}
_GPT2_NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

_MICRO = ("2 layers of width 32, to try a command line in seconds", 1e-2)
_MINI = ("2 layers of width 128, for five nodes on one machine", 3e-3)
_TINY = ("learns something in a minute on a laptop's CPU", 1e-3)

# Learning rates of published shapes: about those of OPT and GPT-3 models of the size, which were
# found with batches of half a million tokens and more.
_OPT_SIZES = {
    "micro": _opt(*_MICRO, 32, 2, 2, **_OPT_NO_DROPOUT),
    "mini": _opt(*_MINI, 128, 2, 2, max_position_embeddings=128, **_OPT_NO_DROPOUT),
    "tiny": _opt(*_TINY, 192, 4, 4, **_OPT_NO_DROPOUT),
    "125m": _opt("OPT-125M", 6e-4, 768, 12, 12, **_OPT_VOCAB),
    "1.3b": _opt("OPT-1.3B, in the PyAO paper", 2e-4, 2048, 24, 32, **_OPT_VOCAB),
    "2.7b": _opt("OPT-2.7B", 1.6e-4, 2560, 32, 32, **_OPT_VOCAB),
    "6.7b": _opt("OPT-6.7B", 1.2e-4, 4096, 32, 32, **_OPT_VOCAB),
}
_GPT2_SIZES = {
    "micro": _gpt2(*_MICRO, 32, 2, 2, **_GPT2_NO_DROPOUT),
    "mini": _gpt2(*_MINI, 128, 2, 2, n_positions=128, **_GPT2_NO_DROPOUT),
    "tiny": _gpt2(*_TINY, 192, 4, 4, **_GPT2_NO_DROPOUT),
    "124m": _gpt2("GPT-2", 6e-4, 768, 12, 12, **_GPT2_VOCAB),
    "355m": _gpt2("GPT-2 medium", 3e-4, 1024, 24, 16, **_GPT2_VOCAB),
    "0.8b": _gpt2("GPT-2 large, in the PyAO paper", 2.5e-4, 1280, 36, 20, **_GPT2_VOCAB),
    "1.6b": _gpt2("GPT-2 XL", 2e-4, 1600, 48, 25, **_GPT2_VOCAB),
}
_LLAMA_SIZES = {
    "micro": _llama(*_MICRO, 32, 88, 2, (2, 1)),
    "mini": _llama(*_MINI, 128, 384, 2, (4, 2), max_position_embeddings=128),
    "tiny": _llama(*_TINY, 192, 512, 4, (4, 2)),
    "1.2b": _llama(
        "Llama 3.2 1B, in the PyAO paper", 3e-4, 2048, 8192, 16, (32, 8), **_llama_3(32.0)
    ),
    "3.2b": _llama("Llama 3.2 3B", 3e-4, 3072, 8192, 28, (24, 8), **_llama_3(32.0)),
    "8b": _llama(
        *("Llama 3.1 8B", 3e-4, 4096, 14336, 32, (32, 8)),
        **{**_llama_3(8.0), "tie_word_embeddings": False},
    ),
}

MODEL_SIZES: Mapping[str, Mapping[str, ModelSize]] = MappingProxyType(
    {
        "opt": MappingProxyType(_OPT_SIZES),
        "gpt2": MappingProxyType(_GPT2_SIZES),
        "llama": MappingProxyType(_LLAMA_SIZES),
    }
)
"""Architecture (transformers' ``model_type``) -> name -> shape."""


def find_size(architecture: str, name: str) -> ModelSize:
    """Return the shape called *name*.

    Raises:
        ConfigError: there is none; the nearest name and all names are given.
    """
    sizes = MODEL_SIZES[architecture]
    # The case is forgiven: papers write "1.3B".
    if name.lower() not in sizes:
        raise unknown_name(f"--model_size for {architecture}", name, sizes)
    return sizes[name.lower()]


def build_config(architecture: str, size: ModelSize, **token_settings: int) -> PretrainedConfig:
    """Return the architecture's configuration in this shape.

    Args:
        architecture: a key of :data:`MODEL_SIZES`, which is transformers' ``model_type``.
        size: the shape.
        token_settings: what the tokenizer says: ``vocab_size`` (used if the shape has none of its
            own) and the ids of the special tokens.
    """
    from transformers import AutoConfig

    return AutoConfig.for_model(architecture, **{**token_settings, **size.settings})
