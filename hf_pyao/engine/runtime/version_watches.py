"""What sees in-place changes of a tensor without keeping its memory alive."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class VersionWatch:
    """Sees in-place changes of a tensor without keeping its memory alive.

    Saved-tensor hooks switch off autograd's own check, which is restored with this. A detached
    tensor shares its origin's version counter; given empty data it keeps the counter and lets go
    of the storage.
    """

    __slots__ = ("_counter", "_version")

    def __init__(self, tensor: torch.Tensor, blank: torch.Tensor) -> None:
        """Watch *tensor*; *blank* is an empty tensor of its dtype and device."""
        self._counter = counter = tensor.detach()
        self._version = tensor._version
        counter.data = blank

    @property
    def is_modified(self) -> bool:
        """True once the tensor was changed in place."""
        return self._counter._version != self._version


class EmptiedCounter:
    """Sees in-place changes of a tensor of a subclass without keeping its inner tensors alive.

    A detached tensor shares its origin's version counter; its inner tensors are exchanged for empty
    ones. The counters of inner tensors would not do: a subclass changes them below autograd.
    """

    def __init__(self, tensor: torch.Tensor, inner: Mapping[str, torch.Tensor]) -> None:
        """Watch *tensor*, which has *inner* tensors by attribute.

        Raises:
            AttributeError: its class does not let them be exchanged.
            TypeError: the same, or its ``detach`` makes no other tensor.
        """
        self._counter = tensor.detach()
        if self._counter is tensor:
            raise TypeError("a detached tensor is another object")
        self._version = tensor._version
        for name, each in inner.items():
            setattr(self._counter, name, each.new_empty(0))

    @property
    def is_modified(self) -> bool:
        """True once the tensor was changed in place."""
        return self._counter._version != self._version
