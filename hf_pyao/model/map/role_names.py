"""How architectures name the parts of a layer: the one table that roles are inferred from.

To teach hf_pyao a usual name, add it here: the patterns hold for every architecture without a map.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Literal, TypeAlias

from torch import nn

from hf_pyao.model.map.module_walk import CONTAINERS

Kind: TypeAlias = Literal[
    "linear", "norm", "activation", "dropout", "attention", "container", "other"
]
"""What a module is, as far as roles ask."""

_ACTIVATION_HOMES = frozenset({"torch.nn.modules.activation", "transformers.activations"})
_KIND_OF_CLASS: tuple[tuple[Kind, str], ...] = (
    ("dropout", r"Dropout"),
    ("norm", r"Norm"),
    ("attention", r"Attention"),
    ("activation", r"(GELU|Gelu|SiLU|Silu|ReLU|Swish|Mish|Activation)\w*$"),
    ("linear", r"Linear|^Conv1D$"),
)
"""Kind -> what a class's name, or that of a base class, holds; the first that fits. Classes of
adapters, quantization and fused kernels keep these parts of the names: no import is needed."""

# Patterns of names: the last component of a path, or the last ones where a pattern has a dot.
QKV = (
    r"(to_|W)?(q|k|v|kv|qkv)",
    r"(q|k|v|kv|qkv)(_[ab])?_(proj|lin|linear)(_with_mqa)?",
    r"(query|key|value|query_key_value)(_(proj|layer|linear))?",
    r"c_attn|q_attn",
)
ATTN_PROJ = (
    r"o|[wW]o|proj|dense",
    r"(o|out|c|output)_(proj|lin|linear)",
    r"to_out(\.0)?",
)
MLP_UP = (
    r"(gate|up|gate_up)_proj",
    r"(fc|lin|linear)_?1|fc_in|c_fc|w1|w3|[wW]i(_[01])?",
    r"dense_h_to_4h|input_linear|ffn|ffn_up",
    r"intermediate\.dense|intermediate_dense",
)
MLP_DOWN = (
    r"(down|c)_proj",
    r"(fc|lin|linear)_?2|fc_out|w2|[wW]o",
    r"dense_4h_to_h|output_linear|ffn_output|ffn_down",
    r"output\.dense|output_dense",
)
EXPERTS = (r"experts",)
ROUTER = (r"gate|router|\w+_gate|\w+_router",)

POST_ATTENTION_NORM = (r"post_attention_(layer_?)?norm",)
"""Stands before the MLP in Llama, after attention in Gemma 2 and OLMo 2; see ``role_inference``."""
MLP_NORM = (
    r"\w*(ff|ffn|mlp|feed_?forward|moe)_?(layer_?)?norm(_\d)?",
    r"ln_mlp|ln_2|\w*norm_?2",
    r"(final|output)_layer_?norm|layer_?norm_after",
)
ATTN_NORM = (
    r"\w*(attn|attention)_?(layer_?)?norm",
    r"ln_(attn|cross_attn)|ln_1|\w*norm_?1",
    r"(input_|sa_)?layer_?norm|layer_?norm_before",
)
WHOLE_BLOCK_NORM = (r"LayerNorm|layer_norm",)
"""In an attention module itself, no norm of queries or keys but that of the residual (ALBERT)."""

ATTN_DROPOUT = (r"resid_attn_dropout|post_attention_dropout",)
MLP_DROPOUT = (r"resid_mlp_dropout|post_mlp_dropout",)
RESIDUAL_DROPOUT = (r"resid(ual)?_drop(out)?|out(put)?_drop(out)?|proj_drop(out)?",)
"""In an attention or MLP module: the one behind its last product."""
PLAIN_DROPOUT = (r"dropout",)


def is_named(path: str, patterns: tuple[str, ...]) -> bool:
    """Say whether the end of *path* fits one of *patterns*, by whole components."""
    return re.search(rf"(?:^|\.)(?:{'|'.join(patterns)})$", path) is not None


def kind_of(module: nn.Module) -> Kind:
    """Say what *module* is, by the names of its class and base classes."""
    module_class: Any = type(module)
    return _kind_of_class(module_class)


@functools.cache
def _kind_of_class(module_class: Any) -> Kind:
    if issubclass(module_class, CONTAINERS):
        return "container"
    bases = module_class.__mro__[: module_class.__mro__.index(nn.Module)]
    for kind, pattern in _KIND_OF_CLASS:
        if any(re.search(pattern, cls.__name__) for cls in bases):
            return kind
    return "activation" if any(cls.__module__ in _ACTIVATION_HOMES for cls in bases) else "other"
