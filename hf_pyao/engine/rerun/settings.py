"""Settings of torch, for the whole process or thread, that change what an operation computes.

A replay gives forward's numbers only under forward's settings, whatever they are by the time of
backward.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

Settings = tuple[Any, ...]
"""Values of all settings at some moment."""

Setting = tuple[Callable[[], Any], Callable[[Any], object]]
"""How one is asked for, and how it is set."""


@functools.cache
def _let_torch_warn() -> None:
    """Ask for the older setting of TF32 once with no one listening.

    Builds of torch 2.9 and 2.10 for CUDA warn at the first time: a user would be told to change
    what only this module asks for.
    """
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")
        torch._C._get_float32_matmul_precision()


def _matmul_precision() -> str | None:
    """Return the precision of fp32 products; None where torch's newer setting is in use.

    That one torch does not let be mixed with the older, so that it is left as it is.
    """
    _let_torch_warn()
    try:
        return torch._C._get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_matmul_precision(value: str | None) -> None:
    if value is not None:
        torch._C._set_float32_matmul_precision(value)


def _set_parts(setter: str, value: Any) -> None:
    """Set what older releases of torch have as one value, and newer ones as several."""
    getattr(torch._C, setter)(*(value if isinstance(value, tuple) else (value,)))


def _of_torch(*names: tuple[str, str]) -> list[Setting]:
    """Return the settings that this release of torch has, by names of how it asks and sets."""
    return [
        (getattr(torch._C, f"_get_{get}"), functools.partial(_set_parts, f"_set_{put}"))
        for get, put in names
        if hasattr(torch._C, f"_get_{get}")
    ]


_SAME_NAMES = (
    *("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "mkldnn_enabled"),
    *("mkldnn_deterministic", "cublas_allow_fp16_accumulation"),
    *("cublas_allow_fp16_reduced_precision_reduction",),
    *("cublas_allow_bf16_reduced_precision_reduction",),
)
_KERNELS = ("flash", "mem_efficient", "math", "cudnn", "overrideable")
_SETTINGS: tuple[Setting, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_num_threads, torch.set_num_threads),
    (_matmul_precision, _set_matmul_precision),
    *_of_torch(*((name, name) for name in _SAME_NAMES)),
    # Which kernels of attention are allowed.
    *_of_torch(*((f"{name}_sdp_enabled", f"sdp_use_{name}") for name in _KERNELS)),
)


def current_settings() -> Settings:
    """Return the settings as they are now; the first is the default dtype."""
    return tuple([get() for get, _ in _SETTINGS])


def apply_settings(now: Settings, wanted: Settings) -> None:
    """Make the settings *wanted*, where they are *now*."""
    for (_, put), before, after in zip(_SETTINGS, now, wanted, strict=True):
        if before != after:
            put(after)
