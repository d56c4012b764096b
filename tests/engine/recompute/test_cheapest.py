"""The search for what must be stored, on graphs drawn at random and chains of a given length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from hf_pyao.engine.recompute.cheapest import MAX_DEPTH, cheapest
from hf_pyao.plan.step.layer_graph import INPUT, MADE, GraphOperation, GraphValue, LayerGraph
from hf_pyao.plan.step.layer_recipes import RecipeSearch
from hf_pyao.plan.step.step_program import Operation


@dataclass
class Numbers:
    """A graph of numbers."""

    reads: dict[int, tuple[int, ...]]
    """By value; what is not in here cannot be made again."""
    sizes: Sequence[int]
    there: set[int] = field(default_factory=set)
    cannot_be_stored: set[int] = field(default_factory=set)

    def is_there(self, value: int) -> bool:
        return value in self.there

    def parents(self, value: int) -> Sequence[int] | None:
        return self.reads.get(value)

    def may_store(self, value: int) -> bool:
        return value not in self.cannot_be_stored

    def nbytes(self, value: int) -> int:
        return self.sizes[value]

    stored_bytes = nbytes


def suffices(graph: Numbers, anchors: set[int], target: int) -> bool:
    """Say whether *target* can be made from *anchors*, by making all that can be made."""
    had = anchors | graph.there
    while True:
        fresh = {v for v, reads in graph.reads.items() if v not in had and had.issuperset(reads)}
        if not fresh:
            return target in had
        had |= fresh


def draw(random: Random) -> Numbers:
    num = random.randrange(2, 9)
    reads = {
        value: tuple(random.sample(range(value), random.randrange(1, min(value, 3) + 1)))
        for value in range(1, num)
        if value == num - 1 or random.random() < 0.8
    }
    return Numbers(
        reads,
        [random.choice([1, 2, 4, 8]) for _ in range(num)],
        {value for value in range(num - 1) if random.random() < 0.15},
        {value for value in range(num) if random.random() < 0.3},
    )


def test_what_is_stored_suffices_and_nothing_cheaper_was_passed_over_on_a_chain() -> None:
    random = Random(0)
    num_found = 0
    for _ in range(500):
        graph = draw(random)
        target = len(graph.sizes) - 1
        graph.there.discard(target)
        storable = [v for v in range(target) if graph.may_store(v) and not graph.is_there(v)]
        choices = [
            set(each)
            for count in range(len(storable) + 1)
            for each in itertools.combinations(storable, count)
            if suffices(graph, set(each), target)
        ]
        found = cheapest(graph, target)
        assert (found is None) == (not choices)
        if found is None:
            continue
        num_found += 1
        assert set(found) <= set(storable)
        assert suffices(graph, set(found), target)
        if all(len(reads) == 1 for reads in graph.reads.values()):  # greedy is best on a chain
            assert sum(graph.sizes[v] for v in found) == min(
                sum(graph.sizes[v] for v in each) for each in choices
            )
    assert num_found > 200


@pytest.mark.parametrize(("length", "is_found"), [(MAX_DEPTH, True), (MAX_DEPTH + 1, False)])
def test_the_planner_ends_where_the_engine_does(length: int, is_found: bool) -> None:
    """It planned longer chains once, which the engine then did not replay."""
    operations = [
        GraphOperation(number, "cheap", False, (number,), (number + 1,)) for number in range(length)
    ]
    made = [GraphValue(64, MADE) for _ in range(1, length)]
    values = [GraphValue(64, INPUT), *made, GraphValue(128, MADE, slot="s")]
    graph = LayerGraph(layer=0, values=values, operations=operations)
    costs = {number: Operation("add", "", 1.0, 1, is_kernel=True) for number in range(length)}
    gone = dict.fromkeys(range(1, length), 1)  # all but the first value and the slot's
    search = RecipeSearch(graph, costs, packed_at={"s": length}, died_at=gone)
    recipe = search.find(["s"], ["s"], ["s"], [])
    assert ("s" in recipe.order) is is_found
    assert ("s" in recipe.refused) is not is_found
    assert list(recipe.anchors) == ([0] if is_found else [])
