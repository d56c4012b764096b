"""Autograd's stack of saved-tensor hooks, which others push to as well."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from itertools import starmap
from typing import Any

import torch

from hf_pyao.engine.torch_hooks.torch_stacks import Stack
from hf_pyao.errors import warn

logger = logging.getLogger(__name__)

Pack = functools.partial[Any]

_CHECKPOINT_HOOKS = ("_checkpoint_hook", "_recomputation_hook")

_IS_ON = "is_on"
"""Attribute of a pack function of ours: True while it is on the stack, as far as we did that."""

_IS_SECOND_RUN = "is_second_run"
"""Attribute of a pack function of ours that gets what a layer saves which runs again."""

_push: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks
_pop: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
_top: Callable[[], Any] = functools.partial(
    torch._C._autograd._top_saved_tensors_default_hooks,
    True,  # whether a compiler traces or not
)

_STACK = Stack(top=_top, pop=_pop, lift=(_top, _pop), push_all=functools.partial(starmap, _push))


def is_inside_checkpoint() -> bool:
    """Say whether a checkpoint, torch's or a layer's second run of ours, was entered last."""
    top = _top()
    if top is None:
        return False
    return _IS_SECOND_RUN in getattr(top[0], "__dict__", ()) or _is_of_torchs_checkpoint(top)


def hooks_of_checkpoint() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return pack and unpack of torch's checkpoint, if it was entered last; else None."""
    top = _top()
    return top if top is not None and _is_of_torchs_checkpoint(top) else None


def topmost_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return pack and unpack of whoever was entered last; None if no hooks are on."""
    return _top()  # type: ignore[no-any-return]


def _is_of_torchs_checkpoint(hooks: Any) -> bool:
    return any(name in getattr(hooks[0], "__qualname__", "") for name in _CHECKPOINT_HOOKS)


def pack_hook(pack: Callable[..., Any], call: Any, *, is_second_run: bool = False) -> Pack:
    """Return *pack* bound to *call*, to be known as ours on the stack.

    *is_second_run*: a layer runs again in backward while it is on.
    """
    hook = functools.partial(pack, call)
    vars(hook)[_IS_ON] = False
    if is_second_run:
        vars(hook)[_IS_SECOND_RUN] = True
    return hook


def push_hooks(pack: Pack, unpack: Callable[..., Any]) -> None:
    """Put a hook made by :func:`pack_hook` on the stack.

    Where it is interrupted, call :func:`pop_hooks` before anyone else pushes or pops.
    """
    _push(pack, unpack)
    vars(pack)[_IS_ON] = True


def pop_hooks(pack: Pack, layer: str) -> None:
    """Take the hooks of *layer* down, whose pack hook is *pack*; from under others if need be.

    A checkpoint whose forward failed may leave its own hooks on until its traceback is gone (seen
    in torch 2.9); it takes the topmost down then, which must be its own.
    """
    was_on = vars(pack)[_IS_ON]
    vars(pack)[_IS_ON] = False
    top = _top()
    if top is not None and top[0] is pack:
        _pop()
    elif not _STACK.take_out(lambda hooks: hooks[0] is pack) and was_on:
        # Someone's exit took ours for their own, as after an interrupt: the topmost is theirs.
        if _top() is not None:
            _pop()
        warn(
            logger,
            "hooks-taken-down",
            "the saved-tensor hooks of layer %r were taken down by someone else before it ended.",
            layer,
        )


def no_hooks() -> contextlib.AbstractContextManager[None]:
    """Have nobody's hooks on inside of this context."""
    return _STACK.emptied()


def pop_left_behind() -> None:
    """Take down whatever is ours; for moments in which no layer of this thread runs."""
    while _STACK.take_out(_is_left_behind):
        pass


def _is_left_behind(hooks: Any) -> bool:
    pack = hooks[0]
    if type(pack) is not functools.partial or _IS_ON not in vars(pack):
        return False
    vars(pack)[_IS_ON] = False  # whoever pushed them need not look for them any more
    return True
