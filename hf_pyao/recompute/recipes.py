"""Recipes: what of a layer call's saved tensors is dropped in forward and rebuilt in backward.

A recipe leads from a dropped storage back to values that are there in backward: stored ones,
parameters, tiny constants. It may ask to store a value that autograd does not save, where that is
smaller: the 16-bit input of a norm instead of the fp32 copy that the norm makes of it. Where no
recipe is found, or none that saves bytes, the slot is stored as if nothing had been asked.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TypeAlias

import torch

from hf_pyao.recompute.trace_values import Value
from hf_pyao.recompute.tracing import Trace
from hf_pyao.runtime.recomputation import Refused
from hf_pyao.transfer.layout import SUBCLASS, reason_not_movable

NOT_SEEN = "not made by operations that were seen"
NO_RECIPE = "made by operations that are not replayed"
NO_GAIN = "sources are no smaller"

MAX_DEPTH = 256
"""Longest chain of operations that a recipe may have."""

Anchors: TypeAlias = "dict[Value, torch.Tensor]"
"""Values to store for a recipe, though autograd does not save them, and a tensor on each."""


class RecipeFinder:
    """Finds the way to rebuild a value that stores the fewest further bytes.

    Args:
        trace: what was seen of the layer call.
        shared_keys: storages that other layers get too: to keep one of them costs this layer
            nothing.
    """

    def __init__(self, trace: Trace, shared_keys: Container[int] = frozenset()) -> None:
        self._trace = trace
        self._shared_keys = shared_keys
        self._found: dict[Value, Anchors | None] = {}
        self._depth = 0

    def find(self, target: Value) -> Anchors | Refused:
        """Return what must be stored to rebuild *target*, or why it is not to be dropped.

        Storing a value itself is preferred to storing as many bytes of what it was made from. The
        search is greedy: what two branches both need is counted once, but no branch is chosen for
        what another one has chosen.
        """
        if target.producer is None:
            return Refused(NOT_SEEN)
        anchors = self._made(target)
        if anchors is None:
            return Refused(NO_RECIPE)
        if self._num_bytes(anchors) >= target.nbytes:
            return Refused(NO_GAIN)
        return anchors

    def _cheapest(self, value: Value) -> Anchors | None:
        """Return the values to store so that *value* is there in backward; None if impossible."""
        if value.source is not None or value.is_planned:
            return {}
        if value not in self._found:
            self._found[value] = None  # while its own sources are looked at
            made = self._made(value)
            tensor = _storable(value)
            if tensor is not None and (made is None or value.nbytes <= self._num_bytes(made)):
                made = {value: tensor}
            self._found[value] = made
        return self._found[value]

    def _made(self, value: Value) -> Anchors | None:
        operation = value.producer
        if operation is None or not self._trace.may_replay(operation) or self._depth >= MAX_DEPTH:
            return None
        self._depth += 1
        anchors: Anchors | None = {}
        for parent in operation.parents:
            needed = None if parent.is_blocked else self._cheapest(parent)
            if needed is None or anchors is None:
                anchors = None
                break
            anchors.update(needed)
        self._depth -= 1
        return anchors

    def _num_bytes(self, anchors: Anchors) -> int:
        return sum(
            value.nbytes
            for value, tensor in anchors.items()
            if tensor.untyped_storage()._cdata not in self._shared_keys
        )


def settle(target: Value) -> None:
    """Mark *target*, and all that is rebuilt on the way to it, as available to other recipes."""
    pending = [target]
    while pending:
        value = pending.pop()
        if value.source is None and not value.is_planned:
            value.plan()
            assert value.producer is not None
            pending.extend(value.producer.parents)


def _storable(value: Value) -> torch.Tensor | None:
    """Return a tensor on *value*'s storage, if it can be stored of our own accord."""
    tensor = value.live_tensor()
    if tensor is None or not value.is_readable or value.is_blocked:
        return None
    reason = reason_not_movable(tensor)
    return None if reason is not None and reason != SUBCLASS else tensor
