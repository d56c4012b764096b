"""Calling an operator from the handler of a dispatch mode as it is called without the mode.

[Note: Autocast in modes]
torch runs the handler of a dispatch mode with the dispatch keys of autocast excluded. Its own
kernels are below autocast in any case. But the kernel of a custom operator may be Python code, and
autocast casts for the products in it (``gemm_4bit`` of bitsandbytes is one). Under a mode they
would not be cast, and the layer would compute other bits than without the mode. So custom operators
are called with the keys that held where the operator was called.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

_OF_TORCH = frozenset({"aten", "prim", "prims", "quantized", "c10d"})
_AUTOCAST_KEYS = tuple(
    name for name in torch._C.DispatchKey.__members__ if name.startswith("Autocast")
)


def runner_of(operator: Any) -> Callable[..., Any]:
    """Return what calls *operator* from a mode's handler; see [Note: Autocast in modes].

    Args:
        operator: what the handler was given, an ``OpOverload``.
    """
    if operator.namespace in _OF_TORCH:
        return operator  # type: ignore[no-any-return]
    return functools.partial(run_under_autocast, operator)


def run_under_autocast(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call *operator* from a handler with the autocast of whoever called the operation."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        enabled = [
            name
            for name in _AUTOCAST_KEYS
            if not torch._C._dispatch_tls_is_dispatch_key_excluded(name)
        ]
    with contextlib.ExitStack() as stack:
        for name in enabled:
            key = torch._C.DispatchKey.__members__[name]
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        return operator(*args, **kwargs)
