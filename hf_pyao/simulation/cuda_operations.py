"""Lets tensors of a CPU, fake ones above all, go through the operations that CUDA would pick."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F

from hf_pyao.codecs import bitmask, grouped
from hf_pyao.simulation.codec_kernels import kernels_for

ONE_THREAD = threading.RLock()
"""Held by the thread that has changed something of the whole process for a while.

Two threads that change the same thing, one within the other's time, would not put it back.
"""


class Replacement(NamedTuple):
    """A name of a module that means something else for a while."""

    module: Any
    name: str
    """Left alone if the module has no such name: releases differ."""
    instead: Callable[..., Any]


@contextmanager
def operations_of_cuda(*more: Replacement) -> Iterator[None]:
    """Let torch's functions, called on a CPU, run the operations that they run on CUDA.

    - Attention without a mask is the flash kernel, which takes grouped heads as they are, and saves
      its inputs, its result and a float32 statistic per row; what it drops it draws again.
    - Attention with a mask is the memory-efficient kernel, which saves the mask as a bias besides,
      and takes grouped heads repeated.
    - Dropout saves one byte for each element.
    - Codecs have their kernels, if tensors are fake: one operation each way.

    Args:
        more: what else looks at the device and has to be told; for a model of transformers
            :func:`hf_pyao.integrations.cuda_choices.choices_of_cuda`.

    For the whole process, until it ends: nothing else may run meanwhile. Attention on real tensors
    fails under it: no CPU has the kernel.
    """
    attention = Replacement(F, "scaled_dot_product_attention", _flash_attention)
    codecs = [Replacement(module, "kernels_for", kernels_for) for module in (grouped, bitmask)]
    with replaced(attention, Replacement(F, "dropout", _dropout), *codecs, *more):
        yield


@contextmanager
def replaced(*replacements: Replacement) -> Iterator[None]:
    """Let names mean something else, for the whole process, until it ends.

    One thread at a time: another waits until the first has ended.
    """
    with ONE_THREAD, ExitStack() as stack:
        for module, name, instead in replacements:
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, instead))
        yield


def can_trace_wide_products() -> bool:
    """Say whether torch here can sum products of halves in float32, as CUDA can.

    Under a fake mode: whether it can tell what such a product would return.
    """
    half, wide = torch.empty(1, 1, dtype=torch.bfloat16), torch.empty(1, 1)
    try:
        torch.addmm(wide, half, half, out_dtype=torch.float32, out=wide)
        torch.mm(half, half, out_dtype=torch.float32)
    except (TypeError, RuntimeError):
        return False
    return True


def _flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if attn_mask is not None:
        if enable_gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = (each.repeat_interleave(repeats, -3) for each in (key, value))
        return _efficient_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return result


def _efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    if mask.dtype == torch.bool:
        unmasked = torch.zeros_like(mask, dtype=query.dtype)
        mask = unmasked.masked_fill(mask.logical_not(), float("-inf"))
    bias = mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    saves = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, mask))
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, saves, dropout_p, is_causal, scale=scale
    )[0]
    return result


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]
