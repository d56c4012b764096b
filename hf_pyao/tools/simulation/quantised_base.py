"""Frozen weights in 4 or 8 bits on fake tensors, laid out by bitsandbytes itself.

Linear layers but the head become bitsandbytes' own, as transformers' ``BitsAndBytesConfig`` has it.
Packed weights, scales and tables have the shapes that the library's quantisation returns: its
operators have fake implementations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hf_pyao.errors import ConfigError
from hf_pyao.plan.weights.base_names import INT8, PLAIN

_NUM_PER_NESTED_SCALE = 256


def quantise_linear_layers(model: nn.Module, base: str) -> None:
    """Replace the linear layers of *model*, on the meta device, but for its head.

    Args:
        model: of transformers.
        base: a key of :data:`~hf_pyao.plan.weights.base_names.BASES`.

    Raises:
        ConfigError: bitsandbytes is missing.
    """
    if base == PLAIN:
        return
    library = _library(base)
    anything: Any = model
    head = anything.get_output_embeddings()
    for path, module in list(model.named_modules()):
        if module is head or not _is_linear(module):
            continue
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, _quantised(library, module, base))
    # As from_pretrained leaves it: PEFT asks the model which of its layers to make.
    anything.is_loaded_in_8bit = base == INT8
    anything.is_loaded_in_4bit = base != INT8


def _library(base: str) -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(
            f"--base {base} needs bitsandbytes, which is not installed: pip install bitsandbytes.",
            key="missing-package",
        ) from error
    return bitsandbytes


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def _quantised(library: Any, module: Any, base: str) -> nn.Module:
    """Return a layer of the library's in place of a linear layer."""
    num_out, num_in = module.weight.shape
    if type(module) is not nn.Linear:  # Conv1D, whose weight is transposed
        num_out, num_in = num_in, num_out
    has_bias = module.bias is not None
    new: Any
    if base == INT8:
        new = library.nn.Linear8bitLt(
            num_in, num_out, bias=has_bias, has_fp16_weights=False, threshold=6.0, device="meta"
        )
    else:
        new = library.nn.Linear4bit(
            num_in,
            num_out,
            bias=has_bias,
            compute_dtype=module.weight.dtype,
            compress_statistics=base == "nf4-double",
            quant_type="nf4",
            device="meta",
        )
    if has_bias:
        new.bias = nn.Parameter(module.bias.detach(), requires_grad=False)
    return new  # type: ignore[no-any-return]


def fake_parameter(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter | None:
    """Return a fake stand-in for a quantised parameter on the meta device; None for others.

    The stand-in has the attributes of the library's class, which its layers look at, and is as if
    made of weights of *dtype*.
    """
    kind = type(parameter).__name__
    held: Any = parameter
    weight = torch.empty(parameter.shape, dtype=dtype)
    if kind == "Params4bit":
        functional = _library("nf4").functional
        _make_tables(functional)
        packed, state = functional.quantize_4bit(
            weight,
            blocksize=held.blocksize,
            compress_statistics=held.compress_statistics,
            quant_type=held.quant_type,
            quant_storage=held.quant_storage,
        )
        return _stand_in(parameter, packed, {"quant_state": state, "bnb_quantized": True})
    if kind == "Int8Params":
        packed, scales, _ = _library(INT8).functional.int8_vectorwise_quant(weight.half())
        found = _stand_in(parameter, packed, {"SCB": scales})
        vars(found)["CB"] = found
        return found
    return None


def _stand_in(parameter: nn.Parameter, packed: Tensor, more: dict[str, Any]) -> nn.Parameter:
    found = nn.Parameter(packed, requires_grad=False)
    vars(found).update(vars(parameter))
    vars(found).update(more)
    return found


def _make_tables(functional: Any) -> None:
    """Have the library make the table of nested scales, which it keeps, of real memory."""
    with unset_fake_temporarily():
        functional.quantize_blockwise(torch.zeros(_NUM_PER_NESTED_SCALE))
