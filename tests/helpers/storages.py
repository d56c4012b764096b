"""A referee's ledger: which storages are alive, by torch alone.

It shares nothing with the package: no predictor, no engine, no simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """While active, counts the bytes of the storages that operations return and that live.

    Args:
        is_elsewhere: says of a storage that it is not the device's.
    """

    only_watches = True
    """For layers that run again, which do not under a mode that might change what they compute."""

    def __init__(self, is_elsewhere: Callable[[torch.UntypedStorage], bool]) -> None:
        super().__init__()
        self._is_elsewhere = is_elsewhere
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0
        """Most bytes since the last :meth:`restart`."""

    @property
    def live_bytes(self) -> int:
        """Bytes that are alive now."""
        for key in [key for key, (ref, _) in self._live.items() if ref.expired()]:
            del self._live[key]
        return sum(nbytes for _, nbytes in self._live.values())

    def note(self, tensors: Iterable[Any]) -> None:
        """Count the storages of tensors."""
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            known = self._live.get(storage._cdata)
            if known is not None and not known[0].expired():
                continue
            if not self._is_elsewhere(storage):
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def restart(self) -> None:
        """Begin a new peak."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and count what it returns."""
        result = func(*args, **(kwargs or {}))
        self.note(tree_leaves(result))
        return result
