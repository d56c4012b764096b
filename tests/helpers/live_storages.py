"""Which storages are alive: a witness that shares nothing with hf_pyao."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """While active, notes each storage that an operation returns, by a weak reference.

    Storages of fake tensors and those without bytes do not count: they take no memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._noted: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
                continue
            if leaf.layout is not torch.strided or leaf.device.type == "meta":
                continue
            storage = leaf.untyped_storage()
            known = self._noted.get(storage._cdata)
            if storage.nbytes() and (known is None or known[0].expired()):
                self._noted[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def sizes(self) -> Counter[int]:
        """Return how many storages of each size in bytes are alive."""
        self._noted = {key: each for key, each in self._noted.items() if not each[0].expired()}
        return Counter(nbytes for _, nbytes in self._noted.values())


def num_objects_of_hf_pyao() -> int:
    """Return how many objects of hf_pyao's classes are alive and known to Python's collector.

    Those set aside by ``gc.freeze`` do not count.
    """
    return sum(str(type(each).__module__).startswith("hf_pyao") for each in gc.get_objects())
