"""A recorded step with a plan carried out in it, slot by slot, recomputation included.

A step is recorded with everything offloaded. What a plan drops neither stays nor crosses the link;
its operations run again when backward asks for it. What is stored for that alone (anchors) becomes
slots of its own. So any plan is predicted from the one recording.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hf_pyao.planning.layer_graph import INPUT, MADE
from hf_pyao.planning.layer_recipes import LayerRecipe, Making, RecipeSearch
from hf_pyao.planning.prediction import Coded, Rebuild
from hf_pyao.planning.step_program import FORWARD, OUTSIDE, Buffer, SlotUse, StepProgram
from hf_pyao.report.plan_report import KEEP, OFFLOAD, RECOMPUTE
from hf_pyao.runtime.slots import ANCHOR


@dataclass(frozen=True)
class PlannedStep:
    """What :func:`~hf_pyao.planning.predict.predict` takes."""

    program: StepProgram
    """With anchors among its slots."""
    leaves: list[bool]
    """For each of its slots, whether it is offloaded."""
    rebuilds: Mapping[int, Rebuild]
    """What is dropped, by number."""
    times_ms: Sequence[float]
    """What each operation takes."""
    coded: Mapping[int, Coded] = field(default_factory=dict)
    """Slots that a codec writes smaller where they leave, by number."""
    refused: Mapping[int, set[str]] = field(default_factory=dict)
    """Slots that were to be recomputed and cannot be, by layer."""

    @property
    def rebuild_ms(self) -> float:
        """What is computed again in all."""
        return sum(rebuild.elapsed_ms for rebuild in self.rebuilds.values())


class StepPlanner:
    """Carries out plans in a recorded step.

    Args:
        program: the step, whole, recorded without recomputation.
        times_ms: what each operation takes.
        rebuild_factor: times that, where it runs again to rebuild something.
    """

    def __init__(
        self, program: StepProgram, times_ms: Sequence[float], rebuild_factor: float = 1.0
    ) -> None:
        self.program = program
        self._rebuild_factor = rebuild_factor
        self.times_ms = times_ms
        self._search = _search_of(program)
        self._by_layer: dict[int, list[int]] = defaultdict(list)
        for number, slot in enumerate(program.slots):
            self._by_layer[slot.layer].append(number)
        self._starts = {
            each.layer: each.start for each in reversed(program.segments) if each.phase == FORWARD
        }
        self._births: dict[int, list[int]] = defaultdict(list)
        reloaded = {slot.reloaded for slot in program.slots}
        for number, buffer in enumerate(program.buffers):
            if number not in reloaded:
                self._births[buffer.birth].append(number)
        self._recipes: dict[tuple[object, ...], LayerRecipe] = {}

    @property
    def search(self) -> RecipeSearch | None:
        """What can be rebuilt in a layer; None if the step has no graph."""
        return self._search

    def slots_of(self, layer: int) -> list[int]:
        """Return the numbers of a layer's slots, in the order in which they are saved."""
        return self._by_layer[layer]

    def plan(
        self,
        actions: Sequence[str],
        products: Collection[str] = (),
        otherwise: Sequence[str] | None = None,
        coded: Mapping[int, Coded] | None = None,
    ) -> PlannedStep:
        """Return the step with *actions* carried out.

        Args:
            actions: for each slot, one of ``keep``, ``offload``, ``recompute``.
            products: sub-modules whose matrix products and attention may run again.
            otherwise: for each slot, what becomes of it where it cannot be recomputed, and of what
                is stored to rebuild it; None: it is offloaded.
            coded: slots that a codec writes smaller where they leave, by number.
        """
        program = self.program
        slots: list[tuple[SlotUse, bool, Rebuild | None]] = []
        buffers = list(program.buffers)
        refused: dict[int, set[str]] = {}
        first_asked: dict[int, tuple[int, int]] = {}
        rebuilds: dict[int, Rebuild] = {}
        anchors: dict[int, list[tuple[SlotUse, bool]]] = defaultdict(list)
        for layer, numbers in self._by_layer.items():
            dropped = frozenset(
                program.slots[n].name
                for n in numbers
                if actions[n] == RECOMPUTE and program.slots[n].stays is None
            )
            if not dropped or self._search is None:
                continue
            recipe = self._recipe(numbers, dropped, frozenset(products))
            refused[layer] = recipe.refused
            self._carry_out(
                layer, numbers, recipe, otherwise, first_asked, rebuilds, anchors, buffers
            )
        all_coded: dict[int, Coded] = {}
        for number, slot in enumerate(program.slots):
            for anchor, anchor_leaves in anchors.get(number, ()):
                slots.append((anchor, anchor_leaves, None))
            action = actions[number]
            if action == RECOMPUTE and number not in rebuilds:
                action = OFFLOAD if otherwise is None else otherwise[number]
            if number in first_asked and action == OFFLOAD:
                slot = _asked_earlier(slot, *first_asked[number])
            leaves = action == OFFLOAD and slot.stays is None
            if leaves and coded and number in coded:
                all_coded[len(slots)] = coded[number]
            slots.append((slot, leaves, rebuilds.get(number)))
        return PlannedStep(
            dataclasses.replace(
                program, slots=tuple(slot for slot, *_ in slots), buffers=tuple(buffers)
            ),
            [leaves for _, leaves, _ in slots],
            {n: rebuild for n, (*_, rebuild) in enumerate(slots) if rebuild is not None},
            self.times_ms,
            all_coded,
            {layer: names for layer, names in refused.items() if names},
        )

    def _recipe(
        self, numbers: Sequence[int], dropped: frozenset[str], products: frozenset[str]
    ) -> LayerRecipe:
        assert self._search is not None
        slots = [self.program.slots[number] for number in numbers]
        packed = tuple(slot.name for slot in slots)
        asked = tuple(
            slot.name
            for slot in sorted(slots, key=lambda each: (each.unpacked_at, each.unpack_rank))
            if slot.unpacked_at >= 0
        )
        key = (packed, asked, dropped, products)
        if key not in self._recipes:
            self._recipes[key] = self._search.find(packed, dropped, asked, products)
        return self._recipes[key]

    def _carry_out(
        self,
        layer: int,
        numbers: Sequence[int],
        recipe: LayerRecipe,
        otherwise: Sequence[str] | None,
        first_asked: dict[int, tuple[int, int]],
        rebuilds: dict[int, Rebuild],
        anchors: dict[int, list[tuple[SlotUse, bool]]],
        buffers: list[Buffer],
    ) -> None:
        program, search = self.program, self._search
        assert search is not None
        by_name = {program.slots[number].name: number for number in numbers}
        for name, rebuild in self._rebuilds(layer, recipe).items():
            rebuilds[by_name[name]] = rebuild
        last_read: dict[int, int] = {}
        for name, makings in recipe.order.items():
            for making in makings:
                for value in making.reads:
                    last_read[value] = program.slots[by_name[name]].unpacked_at
        for value, name in recipe.read_for.items():
            asking = program.slots[by_name[name]]
            slot_name = search.graph.values[value].slot
            if slot_name in by_name and value not in recipe.anchors:
                first_asked[by_name[slot_name]] = (asking.unpacked_at, asking.unpack_rank)
        for position, (value, name) in enumerate(recipe.anchors.items()):
            target = program.slots[by_name[name]]
            read_by = recipe.read_for.get(value)
            if read_by is None:
                continue
            asking = program.slots[by_name[read_by]]
            nbytes = self.nbytes_of(layer, value)
            source = self._buffer(layer, value)
            buffers.append(
                Buffer(nbytes, asking.unpacked_at, last_read.get(value, asking.unpacked_at))
            )
            maker = search.maker(value)
            anchor = SlotUse(
                name=f"{'' if maker is None else maker.path}:{ANCHOR}{position}",
                layer=layer,
                nbytes=nbytes,
                link_bytes=nbytes,
                stays=None,
                source=source,
                packed_at=target.packed_at,
                left_at=target.left_at,
                reloaded=len(buffers) - 1,
                unpacked_at=asking.unpacked_at,
                unpack_rank=asking.unpack_rank - 1,
            )
            number = by_name[name]
            leaves = otherwise is None or otherwise[number] == OFFLOAD
            anchors[number].append((anchor, leaves))

    def _rebuilds(self, layer: int, recipe: LayerRecipe) -> dict[str, Rebuild]:
        """Return what each dropped slot of a layer takes."""
        search = self._search
        assert search is not None
        uses: Counter[int] = Counter()
        for makings in recipe.order.values():
            for making in makings:
                uses.update(set(making.reads))
        slots = {search.value_of[name] for name in recipe.order}
        live: dict[int, int] = {}
        found = {}
        for name, makings in recipe.order.items():
            own = search.value_of[name]
            before = most = sum(live.values())
            elapsed_ms = 0.0
            for making in makings:
                elapsed_ms += self.operation_ms(making.number, layer)
                for value in making.makes:
                    if value not in slots and value not in live:
                        live[value] = self.nbytes_of(layer, value)
                most = max(most, sum(live.values()))
                self._let_go(making, uses, live)
            found[name] = Rebuild(elapsed_ms, most - before, sum(live.values()) - before)
            live.pop(own, None)
        return found

    @staticmethod
    def _let_go(making: Making, uses: Counter[int], live: dict[int, int]) -> None:
        for value in making.reads:
            uses[value] -= 1
        for value in [*live]:
            if uses[value] <= 0:
                del live[value]

    # ---- values of a layer ---------------------------------------------------------------------

    def operation_ms(self, number: int, layer: int) -> float:
        """Return what an operation of the graph takes in *layer*, where it runs again."""
        assert self._search is not None
        offset = self._starts[layer] - self._starts[self._search.graph.layer]
        return self.times_ms[number + offset] * self._rebuild_factor

    def nbytes_of(self, layer: int, value: int) -> int:
        """Return the bytes of a value of the graph in *layer*."""
        buffer = self._buffer(layer, value)
        if buffer >= 0:
            return self.program.buffers[buffer].nbytes
        assert self._search is not None
        return self._search.graph.values[value].nbytes

    def _buffer(self, layer: int, value: int) -> int:
        """Return the buffer that holds a value in *layer*; -1 if there is no telling."""
        assert self._search is not None
        graph, program = self._search.graph, self.program
        known = graph.values[value].buffer
        if layer == graph.layer or known < 0:
            return known
        birth = program.buffers[known].birth
        place = self._births[birth].index(known)
        if graph.values[value].origin == MADE:
            at = birth - self._starts[graph.layer] + self._starts[layer]
        elif layer > 0 and graph.layer > 0:
            at = birth - self._starts[graph.layer - 1] + self._starts[layer - 1]
        else:
            return self._input_of_first(program.buffers[known].nbytes)
        there = self._births.get(at, [])
        return there[place] if place < len(there) else -1

    def _input_of_first(self, nbytes: int) -> int:
        """Return the newest buffer of that size which is there when the first layer begins."""
        start = self._starts[0]
        found = [
            number
            for birth in range(start)
            for number in self._births.get(birth, [])
            if self.program.buffers[number].nbytes == nbytes
            and self.program.buffers[number].death > start
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
    return RecipeSearch(graph, operations, shared)


def _asked_earlier(slot: SlotUse, at: int, rank: int) -> SlotUse:
    """Return *slot*, which a replay reads at a moment that may come before autograd's."""
    if slot.unpacked_at < 0 or (slot.unpacked_at, slot.unpack_rank) <= (at, rank):
        return slot
    return slot._replace(
        unpacked_at=at,
        unpack_rank=rank - 1,
        asked_again=(slot.unpacked_at, *slot.asked_again),
    )


def keep_all(program: StepProgram) -> list[str]:
    """Return the actions of keeping everything."""
    return [KEEP] * len(program.slots)
