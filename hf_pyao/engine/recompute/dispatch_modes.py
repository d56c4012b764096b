"""torch's stack of dispatch modes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pyao.engine.torch_hooks.torch_stacks import Stack

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

    def start(self) -> None:
        """See operations from here on."""
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
        _STACK.take_out(lambda mode: mode is self)


def stop_left_behind() -> None:
    """Stop all modes of ours; for moments in which no layer of this thread runs."""
    for mode in modes_on():
        if isinstance(mode, RemovableMode):
            mode.stop()
