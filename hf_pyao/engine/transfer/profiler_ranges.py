"""Named ranges for torch.profiler: what hf_pyao does, by phase and layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_OFF = nullcontext()

is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Says whether a profiler runs. Asked in hot paths before :func:`in_range`."""


def named_range(phase: str, fqn: str = "") -> AbstractContextManager[object]:
    """Return a range ``pyao::<phase> (<fqn>)`` while a profiler runs; else nothing, at no cost."""
    if not is_profiling():
        return _OFF
    return torch.profiler.record_function(f"pyao::{phase} ({fqn})" if fqn else f"pyao::{phase}")


def in_range(function: Function, phase: str, fqn: str) -> Function:
    """Return a function that runs *function* in such a range."""

    def ranged(*args: Any, **kwargs: Any) -> Any:
        with named_range(phase, fqn):
            return function(*args, **kwargs)

    return ranged  # type: ignore[return-value]
