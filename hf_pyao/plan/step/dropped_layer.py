"""Carries out in a recorded step what a plan drops of a layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from hf_pyao.engine.runtime.slots import ANCHOR
from hf_pyao.plan.documents.plan import OFFLOAD
from hf_pyao.plan.step.layer_recipes import LayerRecipe
from hf_pyao.plan.step.layer_replay import Replaying, SlotMoments
from hf_pyao.plan.step.prediction import Rebuild, Replayed
from hf_pyao.plan.step.step_layers import StepLayers
from hf_pyao.plan.step.step_program import Buffer, SlotUse, StepProgram


class Draft:
    """A step that a plan is carried out in."""

    def __init__(self, program: StepProgram, otherwise: Sequence[str]) -> None:
        self.slots = list(program.slots)
        self.buffers = list(program.buffers)
        self.changed: set[int] = set()
        """Numbers of buffers that are not as in the recorded step."""
        self.labels = dict(program.labels)
        self.otherwise = otherwise
        self.rebuilds: dict[int, Rebuild] = {}
        """By slot that is dropped."""
        self.anchors: dict[int, list[tuple[int, SlotUse, bool]]] = defaultdict(list)
        """By slot that is dropped: what is stored for it, and whether that leaves; first what
        :attr:`Replayed.reads` of the draft calls it."""
        self.is_anchor: set[int] = set()
        """Slots that are saved after they were stored for another."""

    def new_buffer(self, nbytes: int, birth: int, death: int, label: str = "") -> int:
        """Add a buffer; return its number."""
        number = len(self.buffers)
        self.buffers.append(Buffer(nbytes, birth, death))
        self.changed.add(number)
        if label:
            self.labels[number] = label
        return number

    def change(self, number: int, buffer: Buffer) -> None:
        """Put *buffer* in place of another."""
        self.buffers[number] = buffer
        self.changed.add(number)

    def extend(self, buffer: int, death: int) -> None:
        """Have a buffer live until *death* at least."""
        if self.buffers[buffer].death < death:
            self.change(buffer, self.buffers[buffer]._replace(death=death))


class DroppedLayer:
    """Carries out what is dropped of one layer, in a draft."""

    def __init__(self, layers: StepLayers, layer: int, recipe: LayerRecipe, draft: Draft) -> None:
        assert layers.search is not None
        self.layers = layers
        self.layer = layer
        self.recipe = recipe
        self.draft = draft
        self.search = layers.search
        self.makers = {
            value: making
            for makings in recipe.order.values()
            for making in makings
            for value in making.makes
        }
        """What makes each value again; also one that nothing could make for a later slot, since
        code without gradients touched it meanwhile."""
        slots = layers.program.slots
        self.by_name = {slots[number].name: number for number in layers.slots_of(layer)}
        asked = [slots[self.by_name[name]].unpacked_at for name in recipe.order]
        self.base = min(asked, default=0)
        """Equal layers have equal moments, from here on."""
        moments = {name: self._moments(self.by_name[name]) for name in recipe.reaches}
        self.replay = layers.replay(recipe, moments)

    def _moments(self, number: int) -> SlotMoments:
        asked_at = self.layers.program.slots[number].unpacked_at
        released_at = self.layers.released_at(number) - self.base
        return SlotMoments(asked_at - self.base if asked_at >= 0 else -1, released_at)

    def run(self) -> None:
        """Do it."""
        buffers = {value: self._buffer(value) for value in self.replay.made_at}
        for name in self.recipe.reaches:
            operations = self.replay.operations.get(name, ())
            self.draft.rebuilds[self.by_name[name]] = self._rebuild(operations, buffers)
        for value, name in self.recipe.read_for.items():
            slot = self.search.graph.values[value].slot
            if slot in self.by_name and value not in self.recipe.anchors:
                self._read_slot(self.by_name[slot], value, name)
        for value in self.search.shared & self.replay.read_at.keys():
            for buffer in self.layers.shared_buffers(self.layer, value):
                self.draft.extend(buffer, self.replay.read_at[value] + self.base)
        for position, (value, name) in enumerate(self.recipe.anchors.items()):
            if value in self.recipe.read_for:
                self._anchor(position, value, name)

    def _rebuild(self, operations: Sequence[Replaying], buffers: Mapping[int, int]) -> Rebuild:
        layers, layer = self.layers, self.layer
        found = []
        for making, makes, frees in operations:
            found.append(
                Replayed(
                    layers.operation_in(making.number, layer),
                    tuple(buffers[value] for value in makes),
                    tuple(buffers[value] for value in frees),
                    sum(layers.nbytes_of(layer, value) for value in making.beside),
                    # As in the engine: its first argument last.
                    tuple(map(self._key, (*making.reads[1:], *making.reads[:1]))),
                    layers.operation_ms(making.number, layer),
                )
            )
        return Rebuild(tuple(found))

    def _key(self, value: int) -> int:
        """Return the number of a value's slot in the program; below 0 where it has none."""
        values = self.search.graph.values
        other = -1 - self.layer * len(values) - value
        return self.by_name.get(values[value].slot, other)

    def _buffer(self, value: int) -> int:
        """Return the buffer of a value that is made again."""
        draft, search = self.draft, self.search
        birth = self.replay.made_at[value] + self.base
        death = self.replay.released_at[value] + self.base
        nbytes = self.layers.nbytes_of(self.layer, value)
        slot = search.graph.values[value].slot
        if slot in self.recipe.reaches and draft.slots[self.by_name[slot]].reloaded >= 0:
            buffer = draft.slots[self.by_name[slot]].reloaded
            draft.change(buffer, Buffer(nbytes, birth, death))
            return buffer
        maker = self.makers[value]
        name = self.layers.program.operations[maker.number].name
        where = " ".join(filter(None, (self.layers.program.layer_names[self.layer], maker.path)))
        return draft.new_buffer(nbytes, birth, death, f"{where} ({name}, run again)")

    def _read_slot(self, number: int, value: int, asking: str) -> None:
        """Have a stored slot be there when the replay for the slot *asking* reads it."""
        draft, slot = self.draft, self.draft.slots[number]
        until = self.replay.read_at[value] + self.base
        if slot.stays is not None or slot.link_bytes == 0:
            buffer = self.layers.buffer_of(self.layer, value)
            if buffer >= 0:
                draft.extend(buffer, until)
            return
        draft.slots[number] = self._read_earlier(slot, asking, until)

    def _read_earlier(self, slot: SlotUse, asking: str, until: int) -> SlotUse:
        asker = self.layers.program.slots[self.by_name[asking]]
        at, rank = asker.unpacked_at, asker.unpack_rank
        if slot.reloaded < 0:
            buffer = self.draft.new_buffer(slot.link_bytes, at, until)
            return slot._replace(
                reloaded=buffer, unpacked_at=at, unpack_rank=rank - 1, is_read_first=True
            )
        self.draft.extend(slot.reloaded, until)
        if (slot.unpacked_at, slot.unpack_rank) <= (at, rank):
            return slot
        asked_again = (slot.unpacked_at, *slot.asked_again)
        return slot._replace(
            unpacked_at=at, unpack_rank=rank - 1, asked_again=asked_again, is_read_first=True
        )

    def _anchor(self, position: int, value: int, name: str) -> None:
        """Store a value for the slot *name*, which is dropped."""
        draft, layers = self.draft, self.layers
        target = layers.program.slots[self.by_name[name]]
        saved = self.by_name.get(self.search.graph.values[value].slot)
        until = self.replay.read_at[value] + self.base
        if saved is None:
            maker = self.search.maker(value)
            nbytes = layers.nbytes_of(self.layer, value)
            slot = SlotUse(
                name=f"{'' if maker is None else maker.path}:{ANCHOR}{position}",
                layer=self.layer,
                nbytes=nbytes,
                link_bytes=nbytes,
                stays=None,
                source=layers.buffer_of(self.layer, value),
                packed_at=target.packed_at,
                left_at=target.left_at,
                reloaded=-1,
                unpacked_at=-1,
            )
        else:
            # Autograd saves it later, and gets what is stored by then.
            slot = draft.slots[saved]._replace(packed_at=target.packed_at, left_at=target.left_at)
            draft.is_anchor.add(saved)
        if slot.source >= 0:
            draft.extend(slot.source, target.packed_at)  # the engine holds it until then
        number = self.by_name[name]
        action = layers.stored(draft.otherwise[number], slot.nbytes)
        anchor = self._read_earlier(slot, self.recipe.read_for[value], until)
        draft.anchors[number].append((self._key(value), anchor, action == OFFLOAD))
