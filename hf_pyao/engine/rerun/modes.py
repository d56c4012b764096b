"""Modes and hooks of other packages that would see, or change, a second run.

A mode (``TorchFunctionMode``, ``TorchDispatchMode``) or a hook on all modules may change what an
operation computes, and may keep a state that no one else can see. So while one of another package
is on, nothing runs a second time. Those of torch itself and of this package only watch, or do the
same each time. A mode that only watches may say so with a class attribute ``only_watches = True``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn, overrides
from torch.utils import _python_dispatch

from hf_pyao.errors import RecomputationError

_function_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
_dispatch_modes: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack
_GLOBAL_HOOKS = tuple(
    f"_global_{name}_hooks" for name in ("forward", "forward_pre", "backward", "backward_pre")
)
"""Names of torch's tables of hooks on all modules."""

_HARMLESS = ("torch.", "hf_pyao.")
"""Packages whose modes and hooks only watch, or do the same in a second run."""


def reason_of_dispatch_modes() -> str:
    """Return why operations may be others than they seem to be, or an empty string."""
    if not torch._C._len_torch_dispatch_stack():
        return ""
    return _reason_of("dispatch mode", _dispatch_modes())


def reason_of_modes_and_hooks() -> str:
    """Return why a layer that is called now cannot run a second time, or an empty string."""
    return reason_of_modes() or _reason_of_hooks()


def reason_of_modes() -> str:
    """Return why operations may be others than they seem to be, in Python or below it."""
    if torch._C._len_torch_function_stack():
        reason = _reason_of("function mode", _function_modes())
        if reason:
            return reason
    return reason_of_dispatch_modes()


def _reason_of(kind: str, modes: list[Any]) -> str:
    for mode in modes:
        if not _is_harmless(type(mode)) and not getattr(mode, "only_watches", False):
            return (
                f"the {kind} {type(mode).__name__} is on, which may change what operations compute"
            )
    return ""


def _reason_of_hooks() -> str:
    tables = vars(nn.modules.module)
    for name in _GLOBAL_HOOKS:
        for hook in tables[name].values():
            if not _is_harmless(getattr(hook, "__func__", hook)):
                called = getattr(hook, "__qualname__", type(hook).__name__)
                return f"the hook {called} on all modules would be called twice"
    return ""


def _is_harmless(defined: Any) -> bool:
    return str(getattr(defined, "__module__", "")).startswith(_HARMLESS)


def refuse_under(reason: str) -> None:
    """Refuse a second run under a mode of another package, which was not on in forward.

    Args:
        reason: what is on; empty if nothing is.

    Raises:
        RecomputationError: such a mode is on.
    """
    if reason:
        raise RecomputationError(
            f"{reason}, and a layer runs again in this backward, whose forward ran without it. "
            "Leave the mode before backward, or give checkpoint_every=0, mlp_tiles='off' and no "
            "recompute_modules. (A mode that only watches may say so: `only_watches = True`.)",
            key="recompute-differs",
        )


@contextlib.contextmanager
def without_function_modes(stays: Callable[[Any], bool]) -> Iterator[None]:
    """Leave only those function modes on inside of this context of which *stays* is true."""
    modes = [torch._C._pop_torch_function_stack() for _ in _function_modes()]
    try:
        for mode in filter(stays, reversed(modes)):
            torch._C._push_on_torch_function_stack(mode)
        yield
    finally:
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)
