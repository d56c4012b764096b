"""Recipes: what of a layer call's saved tensors is dropped in forward and rebuilt in backward.

A recipe leads from a dropped storage back to values that are there in backward: stored ones,
parameters, tiny constants. It may ask to store a value that autograd does not save, where that is
smaller: the 16-bit input of a norm instead of the fp32 copy that the norm makes of it. Where no
recipe is found, or none that saves bytes, the slot is stored as if nothing had been asked.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from hf_pyao.runtime.layout import SUBCLASS, TensorLayout, reason_not_movable
from hf_pyao.runtime.tracing import Trace
from hf_pyao.runtime.values import Value
from hf_pyao.runtime.watching import SlotLabel, WatchedStorage

if TYPE_CHECKING:
    from hf_pyao.runtime.tape import LayerCall

NOT_SEEN = "not made by operations that were seen"
NO_RECIPE = "made by operations that are not replayed"
NO_GAIN = "sources are no smaller"
COMPILED = "compiled code"
ZERO_3 = "parameters gathered by ZeRO-3"
LOST = "not traced"

MAX_DEPTH = 256
"""Longest chain of operations that a recipe may have."""

Anchors: TypeAlias = "dict[Value, torch.Tensor]"
"""Values to store for a recipe, though autograd does not save them, and a tensor on each."""


@dataclass(frozen=True)
class Refused:
    """There is no recipe."""

    reason: str
    """Short and constant, since reports count by it."""


class RecipeFinder:
    """Finds the way to rebuild a value that stores the fewest further bytes."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
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
        if _num_bytes(anchors) >= target.nbytes:
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
            if tensor is not None and (made is None or value.nbytes <= _num_bytes(made)):
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


def settle(target: Value) -> None:
    """Mark *target*, and all that is rebuilt on the way to it, as available to other recipes."""
    pending = [target]
    while pending:
        value = pending.pop()
        if value.source is None and not value.is_planned:
            value.is_planned = True
            assert value.producer is not None
            pending.extend(value.producer.parents)


def _storable(value: Value) -> torch.Tensor | None:
    """Return a tensor on *value*'s storage, if it can be stored of our own accord."""
    tensor = value.tensor()
    if tensor is None or not value.is_readable or value.is_blocked:
        return None
    reason = reason_not_movable(tensor)
    return None if reason is not None and reason != SUBCLASS else tensor


def _num_bytes(anchors: Anchors) -> int:
    return sum(value.nbytes for value in anchors)


class RecomputedStorage(WatchedStorage):
    """One distinct storage that a layer call saved and that was dropped, to be rebuilt."""

    def __init__(
        self,
        call: LayerCall,
        slot: SlotLabel,
        value: Value,
        tensor: torch.Tensor,
        layout: TensorLayout,
    ) -> None:
        self.value = value  # first: the destructor asks for it
        super().__init__(call, slot, value.nbytes, tensor, layout)
        self.let_go_of_source()
        value.slot = weakref.ref(self)

    def covers(self, tensor: torch.Tensor, shares_counter: bool) -> bool:
        """Say whether this may stand for *tensor*, on the same storage and of the same version."""
        trace = self.call.trace
        if trace is None:
            return super().covers(tensor, shares_counter)
        return trace.values.get(tensor.untyped_storage()._cdata) is self.value

    def __del__(self) -> None:
        """Let go of the rebuilt bytes, unless another recipe is about to read them."""
        if self.home is not None:
            self.home.await_everywhere()  # its recipe may hold what was kept on another stream
        value = vars(self).get("value")
        if value is not None and value.uses <= 0:
            value.rebuilt = None
