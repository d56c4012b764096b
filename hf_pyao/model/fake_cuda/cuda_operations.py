"""Lets tensors of a CPU, fake ones above all, go through the operations that CUDA would pick."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pyao.engine.codecs import bitmask, grouped
from hf_pyao.engine.recompute.dispatch_modes import device_asked_for
from hf_pyao.model.attention import kernels as group_kernels
from hf_pyao.model.attention.grouped_attention import as_autocast_has_it
from hf_pyao.model.attention.kernels import AttentionSettings, Kernel, NoKernel, flash_kernel_of
from hf_pyao.model.fake_cuda.codec_kernels import kernels_for
from hf_pyao.model.fake_cuda.quick_results import quick_result
from hf_pyao.plan.hardware.attention_kernels import (
    CUDNN,
    FLASH,
    MATH,
    AttentionRequest,
    choose_attention,
)
from hf_pyao.plan.hardware.kernel_settings import ANY_DEVICE, KernelSettings

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
def operations_of_cuda(*more: Replacement, kernels: KernelSettings = ANY_DEVICE) -> Iterator[None]:
    """Let torch's functions, called on a CPU, run the operations that they run on CUDA.

    - Attention runs the kernel that torch would choose (``plan/hardware/attention_kernels``). Of
    16 bits
      without a mask that is flash attention, which takes grouped heads as they are, and saves its
      inputs, its result and a float32 statistic per row; heads are padded to a multiple of 8. With
      a mask, or of 32 bits, it is the memory-efficient kernel, which saves the mask as a bias
      besides, and takes grouped heads repeated.
    - Dropout saves one byte for each element.
    - Layer normalization saves its statistics in float32, whatever it normalizes
      (``aten/src/ATen/native/cuda/layer_norm_kernel.cu``); on a CPU they have the input's dtype.
    - Codecs have their kernels, if tensors are fake: one operation each way.

    Args:
        more: what else looks at the device and has to be told; for a model of transformers
            :func:`hf_pyao.model.fake_cuda.cuda_choices.choices_of_cuda`.
        kernels: the device and the process that kernels are chosen for.

    For the whole process, until it ends: nothing else may run meanwhile. Attention on real tensors
    fails under it: no CPU has the kernel.
    """
    instead = _Attention(kernels)
    attention = Replacement(F, "scaled_dot_product_attention", instead)
    groups = Replacement(group_kernels, "chosen_kernel", instead.kernel_in_groups)
    codecs = [Replacement(module, "kernels_for", kernels_for) for module in (grouped, bitmask)]
    with replaced(attention, groups, Replacement(F, "dropout", _dropout), *codecs, *more):
        with _ResultsOfCuda():  # type: ignore[no-untyped-call]
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


class _ResultsOfCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives results the dtypes that they have on CUDA, and those of common operations at once."""

    def at_once(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an operation returns here if that is known without running it, or None."""
        return quick_result(func, args, kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        device = device_asked_for(func, args)
        if device is not None:
            return device
        kwargs = kwargs or {}
        quick = quick_result(func, args, kwargs)
        if quick is not None:
            return quick
        result = func(*args, **kwargs)
        if func is torch.ops.aten.native_layer_norm.default and args[0].dtype.itemsize == 2:
            wide = (torch.empty_like(each, dtype=torch.float32) for each in result[1:])
            result = (result[0], *wide)
        return result


class _Attention:
    """Stands for ``torch.nn.functional.scaled_dot_product_attention``."""

    def __init__(self, kernels: KernelSettings) -> None:
        self._kernels = kernels

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if has_torch_function((query, key, value)):  # modes see torch's function too
            given = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            seen: torch.Tensor = handle_torch_function(self, (query, key, value), *given)
            return seen
        # As autocast casts them on CUDA; on a CPU it casts none of them.
        query, key, value = (as_autocast_has_it(each) for each in (query, key, value))
        request = _request(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        kernel = choose_attention(request, self._kernels)
        if kernel == FLASH:
            return _flash_attention(query, key, value, dropout_p, is_causal, scale)
        if enable_gqa and kernel != CUDNN:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = (each.repeat_interleave(repeats, -3) for each in (key, value))
        call = (query, key, value, attn_mask, dropout_p, is_causal)
        if kernel == MATH:
            aten: Any = torch.ops.aten
            result: torch.Tensor = aten._scaled_dot_product_attention_math(*call, scale=scale)[0]
            return result
        run = _cudnn_attention if kernel == CUDNN else _efficient_attention
        return run(*call, scale, request.needs_gradient)

    def kernel_in_groups(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        settings: AttentionSettings,
        *,
        enable_gqa: bool,
    ) -> Kernel | NoKernel:
        """Stand for :func:`hf_pyao.model.attention.kernels.chosen_kernel`."""
        dropout_p, is_causal = settings.dropout_p, settings.is_causal
        request = _request(query, key, value, None, dropout_p, is_causal, enable_gqa)
        kernel = choose_attention(request, self._kernels)
        if kernel == FLASH:
            return flash_kernel_of(query, self._kernels)
        return NoKernel(f"torch chooses its {kernel} kernel")


def _request(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> AttentionRequest:
    tensors = [each for each in (query, key, value, attn_mask) if each is not None]
    return AttentionRequest(
        query.dtype,
        tuple(query.shape),
        tuple(key.shape),
        tuple(value.shape),
        has_mask=attn_mask is not None,
        mask_needs_gradient=attn_mask is not None and attn_mask.requires_grad,
        dropout_p=dropout_p,
        is_causal=is_causal,
        needs_gradient=torch.is_grad_enabled() and any(each.requires_grad for each in tensors),
        is_grouped=enable_gqa,
    )


def _flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    width = query.shape[-1]
    if width % 8:  # torch pads heads, and slices the result
        scale = width**-0.5 if scale is None else scale
        query, key, value = (F.pad(each, (0, 8 - width % 8)) for each in (query, key, value))
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return result[..., :width] if width % 8 else result


def _efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    saves: bool,
) -> torch.Tensor:
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, _bias(mask, query, key), saves, dropout_p, is_causal, scale=scale
    )[0]
    return result


def _cudnn_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    saves: bool,
) -> torch.Tensor:
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, _bias(mask, query, key), saves, dropout_p, is_causal, False, scale=scale
    )[0]
    return result


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return the bias that stands for *mask*, as large as the scores; None without one."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        unmasked = torch.zeros_like(mask, dtype=query.dtype)
        mask = unmasked.masked_fill(mask.logical_not(), float("-inf"))
    return mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]
