"""What an operation's result depends on beside its inputs: noted in forward, put back to run again.

Autocast, settings of torch, which attention kernels are allowed, random states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hf_pyao.recompute.numeric_settings import apply_settings, current_settings
from hf_pyao.recompute.random_state import RandomState

_KERNELS = (
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
)
"""How torch is asked whether a kernel of attention is allowed, and told; not all releases have
all of them."""


class Conditions:
    """Those in which a layer call begins.

    Args:
        devices: accelerators that its tensors are on.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        devices = tuple(devices)
        self._types = tuple(dict.fromkeys(("cpu", *(device.type for device in devices))))
        self._autocast = self._autocast_now()
        self._settings = current_settings()
        self._kernels = _kernels_now()
        self._random = RandomState(devices)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Have them hold inside of this context. Random states stay as they are left in it."""
        settings, kernels = current_settings(), _kernels_now()
        with contextlib.ExitStack() as stack:
            for each, now in zip(self._autocast, self._autocast_now(), strict=True):
                if each != now:
                    kind, is_enabled, dtype, is_caching = each
                    stack.enter_context(
                        torch.autocast(
                            kind, dtype=dtype, enabled=is_enabled, cache_enabled=is_caching
                        )
                    )
            try:
                apply_settings(settings, self._settings)
                _allow_kernels(kernels, self._kernels)
                self._random.restore()
                yield
            finally:
                _allow_kernels(_kernels_now(), kernels)
                apply_settings(current_settings(), settings)

    def _autocast_now(self) -> tuple[tuple[str, bool, torch.dtype, bool], ...]:
        is_caching = torch.is_autocast_cache_enabled()
        return tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), is_caching)
            for kind in self._types
        )


def _kernels_now() -> tuple[Any, ...]:
    return tuple(getattr(torch._C, get)() for get, _ in _KERNELS if hasattr(torch._C, get))


def _allow_kernels(now: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    known = [put for get, put in _KERNELS if hasattr(torch._C, get)]
    for put, before, after in zip(known, now, wanted, strict=True):
        if before != after:
            getattr(torch._C, put)(after)
