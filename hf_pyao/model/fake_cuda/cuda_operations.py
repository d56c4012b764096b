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
from hf_pyao.model.attention.kernels import (
    AttentionCall,
    FlashKernel,
    NoKernel,
    as_autocast_has_it,
    flash_kernel_of,
)
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
      16 bits without a mask that is flash attention, which takes grouped heads as they are, and
      saves its inputs, its result and a float32 statistic per row; heads are padded to a multiple
      of 8. With a mask, or of 32 bits, it is the memory-efficient kernel, which saves the mask as a
      bias besides, and takes grouped heads repeated.
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

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = AttentionCall(*args, **kwargs)
        if has_torch_function(call[:3]):  # modes see torch's function too
            seen: torch.Tensor = handle_torch_function(self, call[:3], *call)
            return seen
        # As autocast casts them on CUDA; on a CPU it casts none of them.
        query, key, value = map(as_autocast_has_it, call[:3])
        call = call._replace(query=query, key=key, value=value)
        request = _request(call)
        kernel = choose_attention(request, self._kernels)
        if kernel == FLASH:
            return _flash_attention(call)
        aten: Any = torch.ops.aten
        query, key, value, mask, dropout_p, is_causal, scale, enable_gqa = call
        if enable_gqa and kernel != CUDNN:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = (each.repeat_interleave(repeats, -3) for each in (key, value))
        run, more = aten._scaled_dot_product_attention_math, [mask, dropout_p, is_causal]
        if kernel != MATH:
            run = aten._scaled_dot_product_efficient_attention
            more = [_bias(mask, query, key), request.needs_gradient, dropout_p, is_causal]
        if kernel == CUDNN:
            run, more = aten._scaled_dot_product_cudnn_attention, [*more, False]
        result: torch.Tensor = run(query, key, value, *more, scale=scale)[0]
        return result

    def kernel_in_groups(self, call: AttentionCall) -> FlashKernel | NoKernel:
        """Stand for :func:`hf_pyao.model.attention.kernels.chosen_kernel`."""
        kernel = choose_attention(_request(call), self._kernels)
        if kernel == FLASH:
            return flash_kernel_of(call.query, self._kernels)
        return NoKernel(f"torch chooses its {kernel} kernel")


def _request(call: AttentionCall) -> AttentionRequest:
    tensors = [each for each in call[:4] if each is not None]
    mask = call.attn_mask
    return AttentionRequest(
        call.query.dtype,
        tuple(call.query.shape),
        tuple(call.key.shape),
        tuple(call.value.shape),
        has_mask=mask is not None,
        mask_needs_gradient=mask is not None and mask.requires_grad,
        dropout_p=call.dropout_p,
        is_causal=call.is_causal,
        needs_gradient=torch.is_grad_enabled() and any(each.requires_grad for each in tensors),
        is_grouped=call.enable_gqa,
    )


def _flash_attention(call: AttentionCall) -> torch.Tensor:
    query, key, value = call[:3]
    width, scale = query.shape[-1], call.scale
    if width % 8:  # torch pads heads, and slices the result
        scale = width**-0.5 if scale is None else scale
        query, key, value = (F.pad(each, (0, -width % 8)) for each in call[:3])
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout_p, call.is_causal, False, scale=scale
    )[0]
    return result[..., :width] if width % 8 else result


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
