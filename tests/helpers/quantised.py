"""Tiny models whose linear layers bitsandbytes has quantised, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

KINDS = ("nf4", "fp4", "nested nf4", "int8")


def quantise_(model: nn.Module, kind: str, compute_dtype: torch.dtype = torch.float32) -> nn.Module:
    """Replace the linear layers of *model*'s decoder layers by quantised ones; return *model*."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="its kernels are needed")

    for path, module in list(model.named_modules()):
        if type(module) is not nn.Linear or ".layers." not in path:
            continue
        new: Any
        weight = module.weight.data
        has_bias = module.bias is not None
        if kind == "int8":
            new = bitsandbytes.nn.Linear8bitLt(
                module.in_features, module.out_features, bias=has_bias, has_fp16_weights=False
            )
            new.weight = bitsandbytes.nn.Int8Params(
                weight, has_fp16_weights=False, requires_grad=False
            )
        else:
            options: dict[str, Any] = {
                "quant_type": kind.split()[-1],
                "compress_statistics": kind.startswith("nested"),
            }
            new = bitsandbytes.nn.Linear4bit(
                module.in_features,
                module.out_features,
                bias=has_bias,
                compute_dtype=compute_dtype,
                **options,
            )
            new.weight = bitsandbytes.nn.Params4bit(
                weight, requires_grad=False, module=new, **options
            )
        if has_bias:
            new.bias = nn.Parameter(module.bias.data, requires_grad=False)
        parent = model.get_submodule(path.rpartition(".")[0])
        setattr(parent, path.rpartition(".")[2], new.to("cpu"))
    return model
