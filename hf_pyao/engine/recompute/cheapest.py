"""The cheapest way to rebuild a value in backward: which other values must be stored for it.

The engine searches the operations that it has just seen (``recipes``), the planner those of a
recorded layer (``hf_pyao.plan.step.layer_recipes``). Both use this search, over a graph that they
describe, so that the engine does what a plan says.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

Value = TypeVar("Value", bound=Hashable)

MAX_DEPTH = 256
"""Longest chain of operations that is searched."""


class Graph(Protocol[Value]):
    """What depends on what in a layer's forward."""

    def is_there(self, value: Value) -> bool:
        """Say whether backward has *value* in any case: it is stored, or rebuilt for another."""
        ...

    def parents(self, value: Value) -> Sequence[Value] | None:
        """Return what is read to make *value* again; None if it cannot be made again."""
        ...

    def may_store(self, value: Value) -> bool:
        """Say whether *value* can be stored though autograd does not save it."""
        ...

    def nbytes(self, value: Value) -> int:
        """Return the size of *value*."""
        ...

    def stored_bytes(self, value: Value) -> int:
        """Return what it costs to store *value*; 0 if others hold it in any case."""
        ...


def cheapest(graph: Graph[Value], target: Value) -> list[Value] | None:
    """Return what must be stored to make *target* again, which itself is not stored.

    Storing a value itself is preferred to storing as many bytes of what it was made from. The
    search is greedy: what two branches both need is counted once, but no branch is chosen for what
    another one has chosen.

    Returns:
        Values to store; empty if all that is needed is there. None if there is no way back, or none
        of at most :data:`MAX_DEPTH` operations.
    """
    found = _Search(graph).made(target)
    return None if found is None else list(found)


def num_bytes(graph: Graph[Value], values: Iterable[Value]) -> int:
    """Return what it costs to store *values*."""
    return sum(graph.stored_bytes(value) for value in values)


class _Search(Generic[Value]):
    """One search; what it has found of a value it finds again."""

    def __init__(self, graph: Graph[Value]) -> None:
        self._graph = graph
        self._found: dict[Value, dict[Value, None] | None] = {}
        self._depth = 0

    def made(self, value: Value) -> dict[Value, None] | None:
        """Return what must be stored to make *value* again; None if impossible."""
        parents = self._graph.parents(value)
        if parents is None or self._depth >= MAX_DEPTH:
            return None
        self._depth += 1
        anchors: dict[Value, None] | None = {}
        for parent in parents:
            needed = self._had(parent)
            if needed is None or anchors is None:
                anchors = None
                break
            anchors.update(needed)
        self._depth -= 1
        return anchors

    def _had(self, value: Value) -> dict[Value, None] | None:
        """Return what must be stored so that *value* is there in backward; None if impossible."""
        graph = self._graph
        if graph.is_there(value):
            return {}
        if value not in self._found:
            self._found[value] = None  # while its own sources are looked at
            made = self.made(value)
            if graph.may_store(value) and (
                made is None or graph.nbytes(value) <= num_bytes(graph, made)
            ):
                made = {value: None}
            self._found[value] = made
        return self._found[value]
