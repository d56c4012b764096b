"""The operations of a layer's forward and what depends on what: from where a tensor can be rebuilt.

Values are storages, as in recomputation (``hf_pyao/engine/recompute``): a view is the value that
it lies in. An operation that writes into a value makes it anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hf_pyao.engine.recompute.operations import Rules

PARAMETER = "parameter"
INPUT = "input"
MADE = "made"


class GraphOperation(NamedTuple):
    """One operation of the layer's forward, in order."""

    number: int
    """Its position among the operations of the recorded step, which have its cost."""
    kind: str
    """How recomputation sees it, see :class:`hf_pyao.engine.recompute.operations.Kind`."""
    is_random: bool
    reads: tuple[int, ...]
    """Values, by position."""
    makes: tuple[int, ...]
    """Values that it makes, or writes into."""


class GraphValue(NamedTuple):
    """A storage that the layer reads or makes."""

    nbytes: int
    origin: str
    """:data:`PARAMETER` for what was there before the step, :data:`INPUT` for what came from before
    the layer, :data:`MADE` for what the layer makes."""
    slot: str = ""
    """The slot that it is saved as; empty if autograd does not save it."""
    buffer: int = -1
    """The step's buffer that holds it; -1 for parameters."""


@dataclass(frozen=True)
class LayerGraph:
    """The forward of one layer."""

    layer: int
    """Its position; it stands for those that are equal to it."""
    operations: Sequence[GraphOperation]
    values: Sequence[GraphValue]
    unseen: tuple[int, ...] = ()
    """Values of which no one knows how they were made: something touched them without gradients."""


class GraphRecorder:
    """Collects the graph of a layer while its operations run."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self._rules = Rules()
        self._operations: list[GraphOperation] = []
        self._numbers: dict[int, int] = {}
        """Buffer of the step, or minus a resident storage's key -> value."""
        self._values: list[GraphValue] = []
        self._unseen: dict[int, None] = {}

    def value(self, key: int, nbytes: int, origin: str) -> int:
        """Return the number of a value, which is new if *key* is."""
        if key not in self._numbers:
            self._numbers[key] = len(self._values)
            self._values.append(GraphValue(nbytes, origin))
        return self._numbers[key]

    def add(self, func: Any, number: int, reads: Sequence[int], makes: Sequence[int]) -> None:
        """Record an operation."""
        rule = self._rules[func]
        self._operations.append(
            GraphOperation(number, rule.kind.value, rule.is_random, tuple(reads), tuple(makes))
        )

    def add_unseen(self, values: Iterable[int]) -> None:
        """Record values that were touched without gradients."""
        self._unseen.update(dict.fromkeys(values))

    def graph(self, slots: Mapping[int, str]) -> LayerGraph:
        """Return what was seen; *slots* names the slot of each buffer that has one."""
        values = list(self._values)
        for key, number in self._numbers.items():
            values[number] = values[number]._replace(slot=slots.get(key, ""), buffer=max(key, -1))
        unseen = tuple(n for n in self._unseen if values[n].origin == MADE)
        return LayerGraph(self.layer, tuple(self._operations), tuple(values), unseen)
