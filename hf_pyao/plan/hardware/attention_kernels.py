"""Which kernel ``scaled_dot_product_attention`` runs on a device: torch's choice, in one place.

The rules are those of pytorch/pytorch, ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``,
``select_sdp_backend`` and the checks that it calls (commit 001f694a), for dense tensors whose last
dimension is contiguous and whose storage is aligned. On a CUDA device torch chooses by itself; this
is for devices that are not there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_pyao.plan.hardware.kernel_settings import KernelSettings

FLASH = "flash"
EFFICIENT = "memory-efficient"
CUDNN = "cuDNN"
MATH = "math"

MOST_FLASH_WIDTH = 256
"""Widest heads of flash attention."""

MOST_CUDNN_WIDTH = 128
"""Widest heads of cuDNN's attention; newer releases take 256 in some cases."""

HALVES = (torch.float16, torch.bfloat16)


class AttentionRequest(NamedTuple):
    """What of a call of attention decides which kernel runs. Shapes are of (B, H, L, D)."""

    dtype: torch.dtype
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    has_mask: bool = False
    mask_needs_gradient: bool = False
    dropout_p: float = 0.0
    is_causal: bool = False
    needs_gradient: bool = True
    is_grouped: bool = False
    """``enable_gqa``: keys and values may have fewer heads."""


def choose_attention(request: AttentionRequest, settings: KernelSettings) -> str:
    """Return the kernel: :data:`FLASH`, :data:`EFFICIENT`, :data:`CUDNN` or :data:`MATH`.

    Args:
        request: the call.
        settings: the device and the process. A device that is not known is taken for one of
            compute capability 8.0, where flash attention runs.
    """
    if len(request.query) != 4:
        return MATH
    if settings.prefers_cudnn and _takes_cudnn(request, settings):
        return CUDNN
    if _takes_flash(request, settings):
        return FLASH
    return EFFICIENT if _takes_efficient(request, settings) else MATH


def _widths(request: AttentionRequest) -> tuple[int, int, int]:
    return request.query[-1], request.key[-1], request.value[-1]


def _heads_match(request: AttentionRequest) -> bool:
    heads, key_heads = request.query[1], request.key[1]
    return heads == key_heads or (request.is_grouped and heads % key_heads == 0)


def _takes_flash(request: AttentionRequest, settings: KernelSettings) -> bool:
    width = request.query[-1]
    capability = settings.capability or 80
    if request.has_mask or request.dtype not in HALVES or capability < 80:
        return False
    if len({*_widths(request)}) > 1 or width > MOST_FLASH_WIDTH or not _heads_match(request):
        return False
    if request.needs_gradient and (86 <= capability <= 89 or capability in (120, 121)):
        if width > 192 and not (width > 224 and request.dropout_p == 0):
            return False
    return not request.is_causal or request.query[-2] == request.key[-2]


def _takes_efficient(request: AttentionRequest, settings: KernelSettings) -> bool:
    capability = settings.capability or 80
    is_half = request.dtype in HALVES
    if request.dtype not in (*HALVES, torch.float32):
        return False
    if request.dtype is torch.bfloat16 and capability < 80:
        return False
    uses_tensor_cores = capability >= 80 or (capability >= 70 and is_half)
    alignment = max(4 if capability >= 80 else 1, (8 if is_half else 4) if uses_tensor_cores else 1)
    query, key, value = _widths(request)
    return query == key and query % alignment == 0 and value % alignment == 0


def _takes_cudnn(request: AttentionRequest, settings: KernelSettings) -> bool:
    query, key, value = _widths(request)
    if settings.is_deterministic or settings.capability < 80 or request.dtype not in HALVES:
        return False
    if request.mask_needs_gradient or not _heads_match(request):
        return False
    if torch.__version__ >= "2.12" and (16 * request.dropout_p) % 1:
        return False  # cuDNN would round it to sixteenths: earlier releases of torch let it
    if max(query, key, value) > MOST_CUDNN_WIDTH or query % 8 or value % 8:
        return False
    return request.key[-2] > 1 and (request.dropout_p == 0 or request.query[-2] > 1)
