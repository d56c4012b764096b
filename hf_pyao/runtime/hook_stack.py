"""Autograd's stack of saved-tensor hooks, which others push to as well."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

_CHECKPOINT_HOOKS = ("_checkpoint_hook", "_recomputation_hook")


def is_inside_checkpoint() -> bool:
    """Say whether a checkpoint of torch's was entered last."""
    top = top_hooks()
    if top is None:
        return False
    return any(name in getattr(top[0], "__qualname__", "") for name in _CHECKPOINT_HOOKS)


def top_hooks() -> Any:
    """Return the saved-tensor hooks that would be called now, pack and unpack; None if none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def pop_hooks(pack: Callable[..., Any], layer: str) -> None:
    """Take the hooks of *layer* down, whose pack hook is *pack*; from under others if need be.

    A checkpoint whose forward failed may leave its own hooks on until its traceback is gone (seen
    in torch 2.9); it takes the topmost down then, which must be its own.
    """
    others = []
    while (top := top_hooks()) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        if top[0] is pack:
            break
        others.append(top)
    else:
        # Someone's exit took ours for their own, as after an interrupt: the topmost is theirs.
        others = others[1:]
        logger.warning(
            "the saved-tensor hooks of layer %r were taken down by someone else before it ended.",
            layer,
        )
    for others_pack, unpack in reversed(others):
        torch._C._autograd._push_saved_tensors_default_hooks(others_pack, unpack)
