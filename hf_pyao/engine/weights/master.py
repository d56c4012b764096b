"""``Master``: one streamed parameter on the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch


class Master:
    """One parameter, and its place in the memory of its layer.

    Args:
        name: qualified name in the model.
        parameter: held weakly; frozen, dense, on any device.
        offset: first byte in the layer's memory.
        home: the device that it goes back to.
    """

    __slots__ = ("dtype", "home", "name", "nbytes", "offset", "ref", "size", "stride")

    def __init__(self, name: str, parameter: torch.Tensor, offset: int, home: torch.device) -> None:
        self.name = name
        self.ref: Callable[[], torch.Tensor | None] = weakref.ref(parameter)
        self.offset = offset
        self.dtype = parameter.dtype
        self.size = parameter.size()
        self.stride = parameter.stride()
        self.nbytes = parameter.numel() * parameter.element_size()
        self.home = home
        """The device that the parameter goes back to."""

    def stand_for(self, parameter: torch.Tensor | None) -> None:
        """Be the master of *parameter*, held weakly; None: of none any more."""
        self.ref = _gone if parameter is None else weakref.ref(parameter)


def _gone() -> None:
    """Return None: the weight has left the memory."""
