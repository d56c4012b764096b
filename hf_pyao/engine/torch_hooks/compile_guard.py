"""Keeping torch.compile out of the engine.

[Note: Compiled code]
torch.compile traces into module hooks, and into whatever Python runs while its code is active, the
engine included. A hook that finds itself traced calls its guarded twin: that breaks the graph, and
the engine runs as it is. From there on all that autograd may call back is guarded too, since the
backward pass may be part of compiled code as well. Outside of compiled code nothing is guarded: a
guard costs 2 us a call, as much as a pack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Return *function* with a guard: compiled code neither traces into it nor runs inside it."""
    guarded: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return guarded
