"""torch's stack of dispatch modes, and the flags that it keeps beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pyao.engine.torch_hooks.torch_stacks import Stack

_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
"""Names of the flags; older releases of torch have not all of them."""

_DEVICE = torch.ops.prim.device.default

current_mode: Callable[[], Any] = _python_dispatch._get_current_dispatch_mode
"""Returns the mode that was entered last; None if none is on."""

_pop: Callable[[], Any] = functools.partial(torch._C._pop_torch_dispatch_stack, None)

_STACK = Stack(
    top=current_mode,
    pop=_pop,
    lift=(_pop,),
    push_all=functools.partial(map, torch._C._push_on_torch_dispatch_stack),
)


def modes_on() -> list[Any]:
    """Return the modes that are on, the one that was entered last at the end."""
    return _python_dispatch._get_current_dispatch_mode_stack()


def take_out_mode(is_meant: Callable[[Any], bool]) -> bool:
    """Take the topmost mode that *is_meant* down, from under others if need be; say if one was."""
    return _STACK.take_out(is_meant)


def flags_of_modes() -> dict[str, bool]:
    """Return what torch notes about the modes that are on, to give it back later."""
    return {
        name: vars(_python_dispatch)[name] for name in _FLAGS if hasattr(_python_dispatch, name)
    }


def restore_flags_of_modes(flags: dict[str, bool]) -> None:
    """Note the same again: an interrupt may have come between a mode and the notes about it."""
    for name, flag in flags.items():
        setattr(_python_dispatch, name, flag)
    tell_compiler = getattr(
        _python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None
    )
    if tell_compiler is not None and _FLAGS[-1] in flags:
        tell_compiler(flags[_FLAGS[-1]])


def device_asked_for(func: Any, args: Sequence[Any]) -> torch.device | None:
    """Return the device of a fake tensor that an operation asks for; None if it does not.

    torch's C++ code asks thousands of times in a step: a mode need not pass that on.
    """
    if func is not _DEVICE:
        return None
    (tensor,) = args
    if not isinstance(tensor, FakeTensor) or tensor.fake_mode.in_kernel_invocation:
        return None
    return tensor.fake_device


class RemovableMode(TorchDispatchMode):
    """A dispatch mode that is on while a layer runs, and may be taken off after an interrupt."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_running = False
        self._flags_before: dict[str, bool] = {}

    def start(self) -> None:
        """See operations from here on."""
        self._flags_before = flags_of_modes()
        self.is_running = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """See no more. It may be called again, also where it was interrupted."""
        if not self.is_running:
            return
        if current_mode() is self:
            try:
                self.__exit__(None, None, None)
            except BaseException:
                self._tear_off()
                raise
        else:
            # Modes that were entered inside the layer are still on, after an interrupt; or we were
            # never on, or are no longer.
            self._tear_off()
        self.is_running = False

    def _tear_off(self) -> None:
        take_out_mode(lambda mode: mode is self)
        restore_flags_of_modes(self._flags_before)


def stop_left_behind() -> None:
    """Stop all modes of ours; for moments in which no layer of this thread runs."""
    for mode in modes_on():
        if isinstance(mode, RemovableMode):
            mode.stop()
