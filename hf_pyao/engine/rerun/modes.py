"""Modes and hooks of other packages that would see, or change, a second run.

A mode (``TorchFunctionMode``, ``TorchDispatchMode``) or a hook on all modules may change what an
operation computes, and may keep a state that no one else can see. So while one of another package
is on, nothing runs a second time. Those of torch itself and of this package only watch, or do the
same each time. A mode that only watches may say so with a class attribute ``only_watches = True``.
"""

from __future__ import annotations

from typing import Any

from torch import nn, overrides
from torch.utils import _python_dispatch

from hf_pyao.errors import RecomputationError

_HARMLESS = ("torch.", "hf_pyao.")
"""Packages whose modes and hooks only watch, or do the same in a second run."""


def reason_of_dispatch_modes() -> str:
    """Return why operations may be others than they seem to be, or an empty string."""
    return _reason_of("dispatch mode", _python_dispatch._get_current_dispatch_mode_stack())


def reason_of_modes() -> str:
    """Return the same, of modes in Python too."""
    function_modes = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return _reason_of("function mode", function_modes) or reason_of_dispatch_modes()


def reason_of_modes_and_hooks() -> str:
    """Return why a layer that is called now cannot run a second time, or an empty string."""
    if reason := reason_of_modes():
        return reason
    tables = vars(nn.modules.module)
    for name in ("forward", "forward_pre", "backward", "backward_pre"):
        for hook in tables[f"_global_{name}_hooks"].values():
            if not _is_harmless(getattr(hook, "__func__", hook)):
                called = getattr(hook, "__qualname__", type(hook).__name__)
                return f"the hook {called} on all modules would be called twice"
    return ""


def _reason_of(kind: str, modes: list[Any]) -> str:
    for mode in modes:
        if not _is_harmless(type(mode)) and not getattr(mode, "only_watches", False):
            return (
                f"the {kind} {type(mode).__name__} is on, which may change what operations compute"
            )
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
