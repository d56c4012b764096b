"""Makes the program of a model with many equal layers from that of one with four.

Equal layers run equal operations. So it is enough to record the first two and the last two: the
second stands for all between, and a buffer that goes from it to the layer behind goes there from
each of its copies.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby

from hf_pyao.errors import ConfigError
from hf_pyao.plan.step.layer_graph import LayerGraph
from hf_pyao.plan.step.step_program import (
    OUTSIDE,
    Buffer,
    Operation,
    Resident,
    Segment,
    SlotUse,
    StepProgram,
)

NUM_RECORDED = 4
"""Layers of a program that can be stretched."""

_REPEATED = 1
"""The layer that stands for those between."""


def stretch(program: StepProgram, layer_names: Sequence[str], added_bytes: int) -> StepProgram:
    """Return the program of a model with more layers.

    Args:
        program: of a model with :data:`NUM_RECORDED` layers.
        layer_names: qualified names of the layers that it is to have.
        added_bytes: what those more take that is there throughout.

    Raises:
        ConfigError: the program has another number of layers, or is to have fewer.
    """
    if program.num_layers != NUM_RECORDED or len(layer_names) < NUM_RECORDED:
        raise ConfigError(
            f"a program of {program.num_layers} layers cannot be stretched to {len(layer_names)}; "
            f"expected one of {NUM_RECORDED}, and no fewer.",
            key="wrong-argument",
        )
    if len(layer_names) == NUM_RECORDED:
        return dataclasses.replace(program, layer_names=tuple(layer_names))
    return _Stretch(program, tuple(layer_names), added_bytes).run()


class _Stretch:
    def __init__(
        self, program: StepProgram, layer_names: tuple[str, ...], added_bytes: int
    ) -> None:
        self.program = program
        self.layer_names = layer_names
        self.added_bytes = added_bytes
        self.last_copy = len(layer_names) - 3
        """Layer in the stretched model that is the last copy; the first is layer 1."""
        self.operations: list[Operation] = []
        self.segments: list[Segment] = []
        self.starts: dict[tuple[int, int], int] = {}
        """Recorded segment, layer in the stretched model -> where it starts."""
        self.bounds = [segment.start for segment in program.segments]
        self.numbers: dict[tuple[int, int], int] = {}
        """Recorded buffer, layer in the stretched model in which it is made -> buffer."""
        self.slot_of = {(slot.layer, slot.name): slot for slot in program.slots}

    def run(self) -> StepProgram:
        self._lay_out()
        buffers = self._buffers()
        slots = sorted(self._slots(), key=lambda slot: slot.packed_at)
        return StepProgram(
            tuple(self.operations),
            tuple(buffers),
            tuple(slots),
            tuple(self.segments),
            self.program.resident_bytes + self.added_bytes,
            self.layer_names,
            self.program.packs,  # of layers before the first that is repeated again
            {
                self.numbers[number, self._stretched(self._layer_that_makes(number))]: name
                for number, name in self.program.labels.items()
            },
            self._graph(),
            self.program.num_tiles,
            self.program.num_tiled_tokens,
            self.program.kernels,
            self._residents(),
            forms={
                number: self.program.forms[recorded]
                for (recorded, _), number in self.numbers.items()
                if recorded in self.program.forms
            },
        )

    def _residents(self) -> tuple[Resident, ...]:
        """Repeat the weights of the repeated layer, layer by layer."""
        found: list[Resident] = []
        for layer, group in groupby(self.program.residents, key=lambda each: each.layer):
            weights = list(group)
            first = self._stretched(layer)
            last = self.last_copy if layer == _REPEATED else first
            for number in range(first, last + 1):
                found += [each._replace(layer=number) for each in weights]
        return tuple(found)

    def _graph(self) -> LayerGraph | None:
        """Return the graph of the layer that is repeated first."""
        graph = self.program.graph
        if graph is None:
            return None
        values = []
        for value in graph.values:
            if value.buffer >= 0:
                layer = self._layer_that_makes(value.buffer)
                value = value._replace(buffer=self.numbers[value.buffer, layer])
            values.append(value)
        return dataclasses.replace(graph, values=tuple(values))

    # ---- operations ----------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """Repeat the segments; neighbouring ones of the repeated layer are repeated together."""
        segments = self.program.segments
        number = 0
        while number < len(segments):
            end = number + 1
            is_repeated = segments[number].layer == _REPEATED
            while is_repeated and end < len(segments) and segments[end].layer == _REPEATED:
                end += 1
            layers: Sequence[int] = [self._stretched(segments[number].layer)]
            if is_repeated:
                layers = range(1, self.last_copy + 1)
                if segments[number].phase == "backward":
                    layers = layers[::-1]
            for layer in layers:
                for recorded in range(number, end):
                    self._append(recorded, layer)
            number = end

    def _append(self, recorded: int, layer: int) -> None:
        segment = self.program.segments[recorded]
        start = len(self.operations)
        self.starts[recorded, layer] = start
        self.operations += self.program.operations[segment.start : segment.end]
        self.segments.append(Segment(segment.phase, layer, start, len(self.operations)))

    def _stretched(self, layer: int) -> int:
        """Return where a recorded layer is that is not repeated (or its first copy)."""
        if layer in (OUTSIDE, 0, _REPEATED):
            return layer
        return len(self.layer_names) - NUM_RECORDED + layer

    def _recorded(self, layer: int) -> int:
        """Return which recorded layer a layer of the stretched model is a copy of."""
        if layer == OUTSIDE or layer == 0:
            return layer
        if layer <= self.last_copy:
            return _REPEATED
        return layer - len(self.layer_names) + NUM_RECORDED

    def _number_of_segment(self, operation: int) -> int:
        return bisect_right(self.bounds, operation) - 1

    def _copies_of(self, layer: int) -> Sequence[int]:
        return range(1, self.last_copy + 1) if layer == _REPEATED else [self._stretched(layer)]

    # ---- buffers -------------------------------------------------------------------------------

    def _buffers(self) -> list[Buffer]:
        found: list[Buffer] = []
        for number, buffer in enumerate(self.program.buffers):
            recorded = self._number_of_segment(buffer.birth)
            segment = self.program.segments[recorded]
            end = self._number_of_segment(buffer.death)
            for layer in self._copies_of(segment.layer):
                birth = self.starts[recorded, layer] + buffer.birth - segment.start
                self.numbers[number, layer] = len(found)
                death = self._death(buffer, end, recorded, layer)
                found.append(Buffer(buffer.nbytes, birth, death))
        return found

    def _death(self, buffer: Buffer, recorded: int, birth_segment: int, birth_layer: int) -> int:
        """Return when the copy of *buffer* dies that is made in a layer.

        Args:
            buffer: of the recorded program.
            recorded: the segment in which it dies.
            birth_segment: the one in which it is made.
            birth_layer: the layer of the stretched program.
        """
        if buffer.death >= self.program.num_operations:
            return len(self.operations)
        segment = self.program.segments[recorded]
        offset = buffer.death - segment.start
        born = self.program.segments[birth_segment]
        distance = segment.layer - born.layer
        # The output of a layer may live until the layer after the next one begins.
        if OUTSIDE not in (segment.layer, born.layer) and abs(distance) <= 2:
            return self._at(birth_layer + distance, recorded, offset)
        if segment.layer != _REPEATED:
            return self.starts[recorded, self._stretched(segment.layer)] + offset
        comes_from_the_end = born.layer == 3 or (born.layer == OUTSIDE and birth_segment > 0)
        return self.starts[recorded, self.last_copy if comes_from_the_end else 1] + offset

    def _at(self, layer: int, recorded: int, offset: int) -> int:
        """Return the operation of *layer* that is like the one at *offset* of a segment."""
        segment = self.program.segments[recorded]
        wanted = self._recorded(layer)
        if segment.layer != wanted:
            # That of another layer, which runs the same. Where layers have several segments in a
            # phase, the one at the same place among them.
            place = self._alike(segment.phase, segment.layer).index(recorded)
            others = self._alike(segment.phase, wanted)
            recorded = others[min(place, len(others) - 1)]
            other = self.program.segments[recorded]
            offset = min(offset, other.end - other.start - 1)
        return self.starts[recorded, layer] + offset

    def _alike(self, phase: str, layer: int) -> list[int]:
        return [
            number
            for number, segment in enumerate(self.program.segments)
            if (segment.phase, segment.layer) == (phase, layer)
        ]

    # ---- slots ---------------------------------------------------------------------------------

    def _slots(self) -> list[SlotUse]:
        found = []
        for slot in self.program.slots:
            for layer in self._copies_of(slot.layer):
                found.append(
                    slot._replace(
                        layer=layer,
                        source=self._source(slot, layer),
                        packed_at=self._moment(slot.packed_at, slot, layer),
                        left_at=self._moment(slot.left_at, slot, layer),
                        reloaded=self._buffer_near(slot.reloaded, slot, layer),
                        unpacked_at=(
                            -1
                            if slot.unpacked_at < 0
                            else self._moment(slot.unpacked_at, slot, layer)
                        ),
                        asked_again=tuple(
                            self._moment(moment, slot, layer) for moment in slot.asked_again
                        ),
                    )
                )
        return found

    def _moment(self, operation: int, slot: SlotUse, layer: int) -> int:
        """Return the moment in *layer* that is like one between operations, of a slot's layer."""
        recorded = self._number_of_segment(min(operation, self.program.num_operations - 1))
        for number in (recorded, recorded - 1):
            segment = self.program.segments[number]
            if segment.layer == slot.layer and segment.start <= operation <= segment.end:
                return self.starts[number, layer] + operation - segment.start
        segment = self.program.segments[recorded]
        return self.starts[recorded, self._stretched(segment.layer)] + operation - segment.start

    def _buffer_near(self, buffer: int, slot: SlotUse, layer: int) -> int:
        """Return the copy of a buffer that a copy of a slot has to do with; -1 for none."""
        if buffer < 0:
            return -1
        birth_layer = self.program.segments[
            self._number_of_segment(self.program.buffers[buffer].birth)
        ].layer
        if birth_layer == OUTSIDE:
            return self.numbers[buffer, OUTSIDE]
        made_in = layer + birth_layer - slot.layer
        known = self.numbers.get((buffer, made_in))
        return known if known is not None else self.numbers[buffer, self._stretched(birth_layer)]

    def _source(self, slot: SlotUse, layer: int) -> int:
        """Return the buffer that a copy of a slot is saved from.

        What a layer gets from the one before is, from the second copy on, what a copy made: the
        buffer from which the layer behind the recorded ones has the slot of the same name.
        """
        made_by = slot
        if slot.layer == _REPEATED and layer > 1:
            made_by = self.slot_of.get((slot.layer + 1, slot.name), slot)
            if made_by.source >= 0 and self._layer_that_makes(made_by.source) == slot.layer:
                return self.numbers[made_by.source, layer - 1]
        return self._buffer_near(slot.source, slot, layer)

    def _layer_that_makes(self, buffer: int) -> int:
        birth = self.program.buffers[buffer].birth
        return self.program.segments[self._number_of_segment(birth)].layer
