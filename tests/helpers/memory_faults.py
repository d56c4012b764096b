"""Raises out-of-memory errors at chosen allocations, as a device without room would."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

EVER = range(10**9)


class MemoryFaults(TorchDispatchMode):
    """Counts the allocations made while it is on, and fails some of them.

    An operation allocates if a tensor that it returns lies in none of the storages that it got. It
    fails before it has done anything, with torch's own error and words like CUDA's. Which operations
    allocate is known from a run before (``allocations``): one that fails cannot tell.

    Args:
        at: numbers of the allocations that fail, from 0 on.
        allocations: from the run before; by number of the operation, the number of its allocation.
    """

    only_watches = True

    def __init__(self, at: Container[int] = (), allocations: dict[int, int] | None = None) -> None:
        super().__init__()
        self.at = at
        self.known = allocations
        self.allocations: dict[int, int] = {}
        self.num_operations = 0
        self.num_raised = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        number = self.num_operations
        self.num_operations += 1
        if self.known is None:
            is_to_fail = self.at is EVER and number > 10
        else:
            is_to_fail = number in self.known and self.known[number] in self.at
        if is_to_fail:
            self.num_raised += 1
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."
            )
        given = storages(args, kwargs or {})
        result = function(*args, **(kwargs or {}))
        if storages(result) - given:
            self.allocations[number] = len(self.allocations)
        return result


def storages(*values: Any) -> set[int]:
    return {
        leaf.untyped_storage()._cdata
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    }


def sample(count: int, num: int) -> Iterable[int]:
    """Return *num* numbers below *count*, evenly spread, ends included."""
    if num >= count:
        return range(count)
    return sorted({round(i * (count - 1) / (num - 1)) for i in range(num)})
