"""Tiny models whose base is frozen, with LoRA adapters that do something."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_pyao.model.map.module_map import find_layers
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


def cast_base_(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Put the frozen matrices of all layers into *dtype*, as a base that is loaded in it has them.

    Embeddings outside of layers, the head and vectors stay, as PEFT leaves them.
    """
    for _, layer in find_layers(model).layers:
        for parameter in layer.parameters():
            is_matrix = parameter.dim() >= 2 and parameter.is_floating_point()
            if is_matrix and not parameter.requires_grad:
                parameter.data = parameter.detach().to(dtype)
    return model
