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


def _deterministic() -> tuple[bool, bool]:
    return torch._C._get_deterministic_algorithms(), (
        torch._C._get_deterministic_algorithms_warn_only()
    )


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch._C._set_deterministic_algorithms(value[0], warn_only=value[1])


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


def _set_parts(setter: Callable[..., object], value: Any) -> None:
    """Set what older releases of torch have as one value, and newer ones as several."""
    setter(*value) if isinstance(value, tuple) else setter(value)


def _of_torch(*names: str) -> list[Setting]:
    """Return the settings of these names that this release of torch has."""
    found = []
    for name in names:
        get = getattr(torch._C, f"_get_{name}", None)
        put = getattr(torch._C, f"_set_{name}", None)
        if get is not None and put is not None:
            found.append((get, put))
    return found


_SETTINGS: tuple[Setting, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_deterministic, _set_deterministic),
    (torch.get_num_threads, torch.set_num_threads),
    (_matmul_precision, _set_matmul_precision),
    *_of_torch("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic"),
    *_of_torch("mkldnn_enabled", "mkldnn_deterministic", "cublas_allow_fp16_accumulation"),
    (
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
        functools.partial(_set_parts, torch._C._set_cublas_allow_fp16_reduced_precision_reduction),
    ),
    (
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
        functools.partial(_set_parts, torch._C._set_cublas_allow_bf16_reduced_precision_reduction),
    ),
)


def current_settings() -> Settings:
    """Return the settings as they are now; the first is the default dtype."""
    return tuple([get() for get, _ in _SETTINGS])


def apply_settings(now: Settings, wanted: Settings) -> None:
    """Make the settings *wanted*, where they are *now*."""
    for (_, put), before, after in zip(_SETTINGS, now, wanted, strict=True):
        if before != after:
            put(after)
