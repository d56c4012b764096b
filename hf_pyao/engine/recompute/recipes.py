"""Recipes: what of a layer call's saved tensors is dropped in forward and rebuilt in backward.

A recipe leads from a dropped storage back to values that are there in backward: stored ones,
parameters, tiny constants. It may ask to store a value that autograd does not save, where that is
smaller: the 16-bit input of a norm instead of the fp32 copy that the norm makes of it. Where no
recipe is found, or none that saves bytes, the slot is stored as if nothing had been asked.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TypeAlias

import torch

from hf_pyao.engine.recompute.cheapest import cheapest, num_bytes
from hf_pyao.engine.recompute.trace_values import Value
from hf_pyao.engine.recompute.tracing import Trace
from hf_pyao.engine.runtime.recomputation import Refused
from hf_pyao.engine.transfer.layout import Stays, reason_not_movable

NOT_SEEN = "not made by operations that were seen"
NO_RECIPE = "made by operations that are not replayed"
NO_GAIN = "sources are no smaller"

Anchors: TypeAlias = "dict[Value, torch.Tensor]"
"""Values to store for a recipe, though autograd does not save them, and a tensor on each."""


class RecipeFinder:
    """Finds the way to rebuild a value that stores the fewest further bytes.

    It describes what was seen to :func:`~hf_pyao.engine.recompute.cheapest.cheapest`.

    Args:
        trace: what was seen of the layer call.
        planned: values that other recipes rebuild.
        shared_keys: storages that other layers get too: to keep one of them costs this layer
            nothing.
    """

    def __init__(
        self, trace: Trace, planned: Container[Value], shared_keys: Container[int]
    ) -> None:
        self._trace = trace
        self._planned = planned
        self._shared_keys = shared_keys
        self._tensors: dict[Value, torch.Tensor] = {}
        """Of the values that can be stored: a tensor on each."""

    def find(self, target: Value) -> Anchors | Refused:
        """Return what must be stored to rebuild *target*, or why it is not to be dropped."""
        if target.producer is None:
            return Refused(NOT_SEEN)
        anchors = cheapest(self, target)
        if anchors is None:
            return Refused(NO_RECIPE)
        if num_bytes(self, anchors) >= target.nbytes:
            return Refused(NO_GAIN)
        return {value: self._tensors[value] for value in anchors}

    def is_there(self, value: Value) -> bool:
        """Say whether backward has *value* in any case."""
        return value.source is not None or value in self._planned

    def parents(self, value: Value) -> Sequence[Value] | None:
        """Return what is read to make *value* again; None if it cannot be made again."""
        operation = value.producer
        if operation is None or not self._trace.may_replay(operation):
            return None
        parents = operation.parents
        return None if any(parent.is_blocked for parent in parents) else parents

    def may_store(self, value: Value) -> bool:
        """Say whether *value* can be stored though autograd does not save it."""
        tensor = _storable(value)
        if tensor is not None:
            self._tensors[value] = tensor
        return tensor is not None

    def nbytes(self, value: Value) -> int:
        """Return the size of *value*."""
        return value.nbytes

    def stored_bytes(self, value: Value) -> int:
        """Return what it costs to store *value*, which can be stored."""
        key = self._tensors[value].untyped_storage()._cdata
        return 0 if key in self._shared_keys else value.nbytes


def settle(target: Value, planned: set[Value]) -> None:
    """Add *target* to *planned*, and all that is rebuilt on the way to it: others may use it."""
    pending = [target]
    while pending:
        value = pending.pop()
        if value.source is None and value not in planned:
            planned.add(value)
            assert value.producer is not None
            pending.extend(value.producer.parents)


def _storable(value: Value) -> torch.Tensor | None:
    """Return a tensor on *value*'s storage, if it can be stored of our own accord."""
    tensor = value.live_tensor()
    if tensor is None or not value.is_readable or value.is_blocked:
        return None
    reason = reason_not_movable(tensor)
    return None if reason is not None and reason is not Stays.SUBCLASS else tensor
