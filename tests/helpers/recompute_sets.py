"""What the tests recompute, alone and beside offloading."""

from __future__ import annotations

from hf_pyao import PyAOConfig

SETS: dict[str, tuple[tuple[str, ...], ...]] = {
    "opt": (
        ("mlp_act",),
        ("attn_norm", "mlp_norm"),
        ("mlp_act", "mlp_down"),
        ("mlp_up", "mlp_act"),
        ("core_attn",),
        (".",),
        ("pointwise",),
        ("*",),
    ),
    "gpt2": (
        ("mlp_act",),
        ("attn_norm", "mlp_norm"),
        ("mlp_act", "mlp_down"),
        ("core_attn",),
        ("*dropout",),
        ("pointwise",),
        ("*",),
    ),
    "llama": (
        ("mlp_act",),
        ("attn_norm", "mlp_norm"),
        ("mlp_act", "mlp_down"),
        ("core_attn",),
        ("mlp",),
        ("pointwise", "core_attn"),
        ("*",),
    ),
}
"""Model -> values of ``recompute_modules``. OPT's dropouts are functions of the layer itself
(``.``); Llama's gated product belongs to ``mlp``."""

CASES = [(model, names) for model, sets in SETS.items() for names in sets]

ALONE = PyAOConfig(
    policy="modules",
    modules=("*",),
    min_bytes=2**40,
    keep_last_layers=0,
    host_memory_gib=0.1,
    window="layer",
)
"""Nothing is large enough to be offloaded."""
