"""Tiny models whose base is frozen, with LoRA adapters that do something."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.helpers import tiny_model


def with_adapters(model: nn.Module, **options: Any) -> nn.Module:
    """Put LoRA on all linear modules of *model*; *options* are those of ``LoraConfig``."""
    torch.manual_seed(7)
    options = {"target_modules": "all-linear", "r": 2, "init_lora_weights": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, on transformers' names and on Conv1D
        return get_peft_model(model, LoraConfig(**options))  # type: ignore[arg-type]


def tiny_lora(model_type: str = "llama", *, adapters: Any = None, **options: Any) -> nn.Module:
    """Return a tiny model with frozen weights and LoRA; *options* are those of ``tiny_model``."""
    return with_adapters(tiny_model(model_type, **options), **(adapters or {}))
