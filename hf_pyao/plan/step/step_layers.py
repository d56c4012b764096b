"""A recorded step seen layer by layer: what each value of a layer is, and how it is made again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

from hf_pyao.plan.documents.plan import KEEP
from hf_pyao.plan.step.layer_graph import INPUT, MADE
from hf_pyao.plan.step.layer_recipes import LayerRecipe, RecipeSearch
from hf_pyao.plan.step.layer_replay import LayerReplay, SlotMoments, replay_layer
from hf_pyao.plan.step.step_program import BACKWARD, FORWARD, OUTSIDE, StepProgram


class StepLayers:
    """The layers of a recorded step.

    Args:
        program: the step, whole, recorded without recomputation.
        times_ms: what each operation takes.
        rebuild_factor: times that, where it runs again to rebuild something.
        min_bytes: what is smaller does not leave.
    """

    def __init__(
        self,
        program: StepProgram,
        times_ms: Sequence[float],
        rebuild_factor: float = 1.0,
        min_bytes: int = 0,
    ) -> None:
        self.program = program
        self._rebuild_factor = rebuild_factor
        self._min_bytes = min_bytes
        self.times_ms = times_ms
        self._search = _search_of(program)
        self._by_layer: dict[int, list[int]] = defaultdict(list)
        for number, slot in enumerate(program.slots):
            self._by_layer[slot.layer].append(number)
        self._starts = {
            each.layer: each.start for each in reversed(program.segments) if each.phase == FORWARD
        }
        self._backward_ends = {
            each.layer: each.end for each in program.segments if each.phase == BACKWARD
        }
        self._births: dict[int, list[int]] = defaultdict(list)
        reloaded = {slot.reloaded for slot in program.slots}
        for number, buffer in enumerate(program.buffers):
            if number not in reloaded:
                self._births[buffer.birth].append(number)
        self._recipes: dict[tuple[object, ...], LayerRecipe] = {}
        self._replays: dict[tuple[object, ...], LayerReplay] = {}

    @property
    def search(self) -> RecipeSearch | None:
        """What can be rebuilt in a layer; None if the step has no graph."""
        return self._search

    def slots_of(self, layer: int) -> list[int]:
        """Return the numbers of a layer's slots, in the order in which they are saved."""
        return self._by_layer[layer]

    def stored(self, action: str, nbytes: int) -> str:
        """Return what becomes of *nbytes* that a plan has kept or offloaded."""
        return KEEP if nbytes < self._min_bytes else action

    def _recipe(
        self,
        numbers: Sequence[int],
        dropped: frozenset[str],
        products: frozenset[str],
        *,
        is_whole: bool = False,
    ) -> LayerRecipe:
        assert self._search is not None
        slots = [self.program.slots[number] for number in numbers]
        packed = tuple(slot.name for slot in slots)
        asked = tuple(
            slot.name
            for slot in sorted(slots, key=lambda each: (each.unpacked_at, each.unpack_rank))
            if slot.unpacked_at >= 0
        )
        key = (packed, asked, dropped, products, is_whole)
        if key not in self._recipes:
            found = self._search.find(packed, dropped, asked, products)
            self._recipes[key] = self._search.as_a_whole(found) if is_whole else found
        return self._recipes[key]

    def replay(self, recipe: LayerRecipe, moments: Mapping[str, SlotMoments]) -> LayerReplay:
        """Return what the replay of a layer holds; equal layers are computed once."""
        assert self._search is not None
        key = (id(recipe), tuple(moments.values()))
        if key not in self._replays:
            self._replays[key] = replay_layer(recipe, self._search.value_of, moments)
        return self._replays[key]

    def released_at(self, number: int) -> int:
        """Return the first operation at which autograd has no handle on a slot any more."""
        slot = self.program.slots[number]
        if slot.reloaded >= 0:
            return self.program.buffers[slot.reloaded].death
        return self._backward_ends.get(slot.layer, self.program.num_operations)

    # ---- values of a layer ---------------------------------------------------------------------

    def operation_ms(self, number: int, layer: int) -> float:
        """Return what an operation of the graph takes in *layer*, where it runs again."""
        return self.times_ms[self.operation_in(number, layer)] * self._rebuild_factor

    def operation_in(self, number: int, layer: int) -> int:
        """Return the operation of *layer* that equals one of the graph's layer."""
        assert self._search is not None
        return number + self._starts[layer] - self._starts[self._search.graph.layer]

    def nbytes_of(self, layer: int, value: int) -> int:
        """Return the bytes of a value of the graph in *layer*."""
        buffer = self.buffer_of(layer, value)
        if buffer >= 0:
            return self.program.buffers[buffer].nbytes
        assert self._search is not None
        return self._search.graph.values[value].nbytes

    def buffer_of(self, layer: int, value: int) -> int:
        """Return the buffer that holds a value in *layer*; -1 if there is no telling.

        Of a value that several layers get it is one that *layer* may get: see
        :meth:`shared_buffers`.
        """
        assert self._search is not None
        graph, program = self._search.graph, self.program
        known = graph.values[value].buffer
        if layer == graph.layer or known < 0 or value in self._search.shared:
            return known
        buffer = program.buffers[known]
        place = self._births[buffer.birth].index(known)
        there = self._births.get(buffer.birth - self._starts[graph.layer] + self._starts[layer], [])
        found = there[place] if place < len(there) else -1
        if graph.values[value].origin == MADE:
            return found
        # Layers before it may differ.
        is_like = found >= 0 and program.buffers[found].nbytes == buffer.nbytes
        return found if is_like else self._newest(buffer.nbytes, self._starts[layer])

    def shared_buffers(self, layer: int, value: int) -> list[int]:
        """Return the buffers that may be what *layer* gets as several layers do.

        Not all layers need get the same: of masks, some get one and some another. So all count that
        are of that size, and made by an operation of that name.
        """
        assert self._search is not None
        known = self._search.graph.values[value].buffer
        return [known] if layer == self._search.graph.layer else self._like(known)

    def _like(self, shared: int) -> list[int]:
        """Return the buffers given to several layers that are like one of them."""

        def kind(buffer: int) -> tuple[int, str]:
            nbytes, birth, _ = self.program.buffers[buffer]
            return nbytes, self.program.operations[birth].name

        return [number for number in self._given_to_layers if kind(number) == kind(shared)]

    @cached_property
    def _shared(self) -> frozenset[int]:
        """Buffers that several layers get, or may get."""
        assert self._search is not None
        values = self._search.graph.values
        known = {values[value].buffer for value in self._search.shared}
        return frozenset(number for each in known for number in (each, *self._like(each)))

    @cached_property
    def _given_to_layers(self) -> list[int]:
        """Buffers from before the first layer that are there until the last one begins."""
        first, last = self._starts[0], self._starts[self.program.num_layers - 1]
        return [
            number
            for birth in range(first)
            for number in self._births.get(birth, [])
            if self.program.buffers[number].death > last
        ]

    def _newest(self, nbytes: int, start: int) -> int:
        """Return the newest buffer of that size which is there when a layer begins; -1: none.

        What several layers get is left out: a mask may be as large as a layer's input.
        """
        found = [
            number
            for birth in range(start)
            for number in self._births.get(birth, [])
            if self.program.buffers[number].nbytes == nbytes
            and self.program.buffers[number].death > start
            and number not in self._shared
        ]
        return found[-1] if found else -1


def _search_of(program: StepProgram) -> RecipeSearch | None:
    graph = program.graph
    if graph is None:
        return None
    operations = {each.number: program.operations[each.number] for each in graph.operations}
    shared = [
        number
        for number, value in enumerate(graph.values)
        if value.origin == INPUT
        and graph.layer > 0
        and value.buffer >= 0
        and program.segment_of(program.buffers[value.buffer].birth).layer == OUTSIDE
    ]
    packed_at = {slot.name: slot.packed_at for slot in program.slots if slot.layer == graph.layer}
    died_at = {
        number: program.buffers[value.buffer].death
        for number, value in enumerate(graph.values)
        if value.buffer >= 0
    }
    return RecipeSearch(graph, operations, shared, packed_at, died_at)
