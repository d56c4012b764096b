"""Named ranges for torch.profiler: what hf_pyao does, by phase and layer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_OFF = nullcontext()


def named_range(phase: str, fqn: str = "") -> AbstractContextManager[object]:
    """Return a range ``pyao::<phase> (<fqn>)`` while a profiler runs; else nothing, at no cost."""
    if not torch._C._autograd._profiler_enabled():
        return _OFF
    return torch.profiler.record_function(f"pyao::{phase} ({fqn})" if fqn else f"pyao::{phase}")
