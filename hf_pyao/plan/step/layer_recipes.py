"""What of a layer is rebuilt from what, by arithmetic: the engine's search on a recorded graph.

The engine looks for a way back to what is stored whenever a slot is to be dropped
(``hf_pyao/engine/recompute/recipes.py``). Here the same search
(``hf_pyao/engine/recompute/cheapest.py``) runs on a :class:`LayerGraph`, where there are no
tensors, so that a plan which recomputes can be predicted from a recorded step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from hf_pyao.engine.recompute.cheapest import cheapest, num_bytes
from hf_pyao.plan.step.layer_graph import MADE, PARAMETER, GraphOperation, LayerGraph
from hf_pyao.plan.step.step_program import Operation

DROPOUT = "native_dropout"
"""Its second result is drawn without looking at what the first is made of."""

REPLAYED = frozenset({"cheap", "product", "fill"})
"""Kinds of operations that run again, see :class:`hf_pyao.engine.recompute.operations.Kind`."""

PRODUCT = "product"


@dataclass(frozen=True)
class Making:
    """An operation, as what makes values."""

    operation: int
    """Its position in the graph."""
    number: int
    """Its position among the operations of the step, which have its cost."""
    path: str
    """The sub-module that runs it."""
    is_product: bool
    reads: tuple[int, ...]
    """Values that must be there to run it again."""
    makes: tuple[int, ...]
    beside: tuple[int, ...] = ()
    """Values as large as what is allocated beside and let go at once, one for each allocation."""


@dataclass
class LayerRecipe:
    """How what is dropped of a layer comes back."""

    order: dict[str, tuple[Making, ...]] = field(default_factory=dict)
    """For each dropped slot, in the order in which backward asks for them, what runs then."""
    anchors: dict[int, str] = field(default_factory=dict)
    """Values that are stored though autograd does not save them, by number, and the dropped slot
    that they are stored for."""
    refused: set[str] = field(default_factory=set)
    """Slots that were to be dropped, and are not: there is no way back, or it stores as much."""
    read_for: dict[int, str] = field(default_factory=dict)
    """Stored values that are read on the way, and the slot at which they are read first."""
    not_asked: tuple[Making, ...] = ()
    """What would run for dropped slots that backward never asks for, and for no other."""
    reaches: dict[str, frozenset[int]] = field(default_factory=dict)
    """For each dropped slot the values on its way back: its own, those that are made again, and
    the stored ones that it ends in."""


class RecipeSearch:
    """Finds what is replayed of a layer.

    Args:
        graph: the layer's forward.
        operations: of the step, by number; or of its layer alone.
        shared: values that several layers read, which are there in any case.
        packed_at: for each slot of the graph's layer, the number of operations before it is saved.
        died_at: for each value, the first operation at which it is gone. What is gone when a slot
            is saved cannot be stored for it.
    """

    def __init__(
        self,
        graph: LayerGraph,
        operations: Mapping[int, Operation],
        shared: Iterable[int] = (),
        packed_at: Mapping[str, int] | None = None,
        died_at: Mapping[int, int] | None = None,
    ) -> None:
        self.graph = graph
        self.packed_at = packed_at or {}
        self.died_at = died_at or {}
        self.shared = frozenset(shared)
        self.value_of = {each.slot: n for n, each in enumerate(graph.values) if each.slot}
        """Number of the value that a slot holds."""
        self.makers: dict[int, Making | None] = {}
        """What makes each value; None if that cannot run again."""
        for position, operation in enumerate(graph.operations):
            step_operation = operations[operation.number]
            for index, value in enumerate(operation.makes):
                is_again = value in self.makers  # written into: which content is it?
                making = _making(position, operation, step_operation, index, graph)
                self.makers[value] = None if is_again else making
        self.makers.update(dict.fromkeys(graph.unseen))

    def maker(self, value: int) -> Making | None:
        """Return what makes *value* and can run again; None if nothing is."""
        return self.makers.get(value) if self.graph.values[value].origin == MADE else None

    def find(
        self,
        packed: Sequence[str],
        dropped: Iterable[str],
        asked: Sequence[str],
        products: Iterable[str],
    ) -> LayerRecipe:
        """Return how *dropped* comes back.

        Args:
            packed: the layer's slots, in the order in which they are saved.
            dropped: those that are to be recomputed.
            asked: slots in the order in which backward asks for them.
            products: sub-modules whose matrix products and attention may run again.
        """
        return _Search(self, frozenset(products)).run(packed, frozenset(dropped), asked)

    def as_a_whole(self, recipe: LayerRecipe) -> LayerRecipe:
        """Return *recipe* where the layer runs again as a whole when the first slot is asked for.

        All its operations run, in order, up to the last that makes something which was dropped.
        """
        if not recipe.order:
            return recipe
        first, *others = recipe.order
        found: dict[int, Making] = {}
        for making in (*chain.from_iterable(recipe.order.values()), *recipe.not_asked):
            known = found.setdefault(making.number, making)
            if known is not making:  # a dropout's result and its mask, of one run
                reads, makes = (*known.reads, *making.reads), (*known.makes, *making.makes)
                found[making.number] = replace(known, reads=reads, makes=makes, beside=())
        last = max(found, default=0)
        for position, each in enumerate(self.graph.operations):
            if each.number < last and each.number not in found:
                found[each.number] = Making(
                    position, each.number, "", False, reads=(), makes=(), beside=each.makes
                )
        in_order = tuple(found[number] for number in sorted(found))
        return replace(
            recipe,
            order={first: in_order, **dict.fromkeys(others, ())},
            read_for=dict.fromkeys(recipe.read_for, first),
            not_asked=(),
        )


class _Search:
    def __init__(self, layer: RecipeSearch, products: frozenset[str]) -> None:
        self.layer = layer
        self.values = layer.graph.values
        self.products = products
        self.stored: set[int] = set(layer.shared) | {
            number for number, value in enumerate(self.values) if value.origin == PARAMETER
        }
        self.planned: set[int] = set()
        self.now = 0
        """Number of operations before the slot is saved that is dropped."""
        self.recipe = LayerRecipe()

    def run(
        self, packed: Sequence[str], dropped: frozenset[str], asked: Sequence[str]
    ) -> LayerRecipe:
        kept_slots = []
        for name in packed:
            value = self.layer.value_of.get(name)
            if name in dropped and value is not None and self._drop(name, value):
                kept_slots.append(name)
                continue
            if name in dropped:
                self.recipe.refused.add(name)
            if value is not None:
                self.stored.add(value)  # also where another slot's recipe would make it again
        done: set[int] = set()
        for name in [each for each in asked if each in kept_slots]:
            self.recipe.order[name] = tuple(self._replay(name, done))
        read_for = dict(self.recipe.read_for)
        not_asked: list[Making] = []
        for name in kept_slots:
            self.recipe.reaches[name] = self._reached(name)
            if name not in self.recipe.order:
                not_asked += self._replay(name, done)
        self.recipe.read_for = read_for
        self.recipe.not_asked = tuple(not_asked)
        return self.recipe

    def _reached(self, name: str) -> frozenset[int]:
        """Return the values on the way back to a dropped slot."""
        pending = [self.layer.value_of[name]]
        seen = set(pending)
        while pending:
            value = pending.pop()
            making = None if value in self.stored else self.layer.maker(value)
            if making is not None:
                fresh = [read for read in making.reads if read not in seen]
                seen.update(fresh)
                pending += fresh
        return frozenset(seen)

    def _drop(self, name: str, value: int) -> bool:
        if value in self.stored:
            return False  # as an anchor of another
        if value in self.planned:
            return True
        self.now = self.layer.packed_at.get(name, 0)
        anchors = cheapest(self, value)
        if anchors is None or num_bytes(self, anchors) >= self.values[value].nbytes:
            return False
        for anchor in sorted(anchors):
            self.stored.add(anchor)
            self.recipe.anchors[anchor] = name
        pending = [value]
        while pending:
            each = pending.pop()
            if each in self.stored or each in self.planned:
                continue
            self.planned.add(each)
            making = self.layer.maker(each)
            assert making is not None
            pending += making.reads
        return True

    # ---- the graph that is searched ------------------------------------------------------------

    def is_there(self, value: int) -> bool:
        """Say whether backward has *value* in any case."""
        return value in self.stored or value in self.planned

    def parents(self, value: int) -> Sequence[int] | None:
        """Return what is read to make *value* again; None if it cannot be made again."""
        making = self.layer.maker(value)
        if making is None or (making.is_product and making.path not in self.products):
            return None
        return making.reads

    def may_store(self, value: int) -> bool:
        """Say whether *value* is there when the slot is saved that is dropped."""
        return self.layer.died_at.get(value, self.now + 1) > self.now

    def nbytes(self, value: int) -> int:
        """Return the size of *value*."""
        return self.values[value].nbytes

    stored_bytes = nbytes

    # ---- what runs -----------------------------------------------------------------------------

    def _replay(self, name: str, done: set[int]) -> list[Making]:
        """Return what runs when *name* is asked for, and has not run for another before."""
        order: dict[int, Making] = {}
        pending: list[tuple[int, bool]] = [(self.layer.value_of[name], False)]
        while pending:
            value, is_ready = pending.pop()
            if value in self.stored:
                self.recipe.read_for.setdefault(value, name)
                continue
            if value in done:
                continue
            making = self.layer.maker(value)
            assert making is not None
            if is_ready:
                order[value] = making
            elif value not in order:
                pending.append((value, True))
                pending += [(read, False) for read in making.reads]
        runs: dict[tuple[int, tuple[int, ...]], Making] = {}
        for making in order.values():
            runs.setdefault((making.operation, making.reads), making)
            done.update(making.makes)
        return list(runs.values())


def _making(
    position: int,
    operation: GraphOperation,
    step_operation: Operation,
    index: int,
    graph: LayerGraph,
) -> Making | None:
    if operation.kind not in REPLAYED:
        return None
    made = operation.makes
    reads = tuple(dict.fromkeys(operation.reads))
    beside: tuple[int, ...] = ()
    if step_operation.name == DROPOUT and len(made) > 1:
        # The engine replays a dropout's mask by itself, from an empty input, and its result by
        # itself. Either makes both.
        is_mask = index == 1
        reads = () if is_mask else reads
        beside = (made[0], made[0]) if is_mask else (made[1],)
        made = (made[index],)
    return Making(
        operation=position,
        number=operation.number,
        path=step_operation.path,
        is_product=operation.kind == PRODUCT,
        reads=reads,
        makes=made,
        beside=beside,
    )
