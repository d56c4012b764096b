"""What two ranks train under DeepSpeed's ZeRO; this file imports no DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    stage: int
    offloads: bool = False
    zero: dict[str, Any] = field(default_factory=dict)
    """Beside what is common to all, of DeepSpeed's ``zero_optimization``."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the configuration."""
    model: str = "llama"
    bf16: bool = False
    cap_kib: int = 300
    """Limit of the device under which a plan offloads something."""
    accumulation: int = 1


SMALL = {
    "stage3_prefetch_bucket_size": 3000,
    "stage3_param_persistence_threshold": 100,
    "stage3_max_live_parameters": 20000,
    "stage3_max_reuse_distance": 4000,
}

NOW: dict[str, Any] = {"window": 0, "checkpoint_every": 0}
"""Copies are waited for at once, so that what is offloaded is gone."""

CASES = {
    "zero 3": Case(3, zero=SMALL, config=NOW),
    "zero 3, defaults": Case(3, config=NOW),
    "zero 3, nothing ahead": Case(
        3,
        zero={**SMALL, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0},
        config=NOW,
    ),
    "zero 3, offloaded": Case(3, offloads=True, zero=SMALL, config=NOW, model="opt"),
    "zero 3, segments": Case(3, zero=SMALL, config={"window": 0, "checkpoint_every": 1}),
    "zero 3, all levers": Case(3, zero=SMALL, config={"window": 0}),
    "zero 3, chunked loss": Case(3, zero=SMALL, config={**NOW, "head_loss": "chunked"}),
    "zero 3, bfloat16": Case(3, zero=SMALL, config=NOW, bf16=True, cap_kib=150),
    "zero 2": Case(2, config=NOW),
    "zero 2, offloaded": Case(2, offloads=True, config=NOW),
    "zero 2, all levers": Case(2, offloads=True, config={"window": 0}),
    "zero 2, chunked loss": Case(2, offloads=True, config={**NOW, "head_loss": "chunked"}),
    "zero 2, accumulated": Case(2, config=NOW, accumulation=2),
    "zero 1": Case(1, config=NOW),
}

TIMED: dict[str, tuple[str, dict[str, int]]] = {
    "nothing ahead": (
        "llama",
        {
            **SMALL,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
        },
    ),
    "adapters": ("llama lora", SMALL),
    "stage 2": ("llama", {"stage": 2}),
}
"""By name: a model, and settings of ZeRO; collectives of each are timed."""

HOLDS = ("nothing ahead",)
"""Of these, also what a long batch with the chunked loss holds; nothing is reused there."""
