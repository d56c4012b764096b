"""A recorded step with a plan carried out in it, slot by slot, recomputation included.

A step is recorded with everything offloaded. What a plan drops neither stays nor crosses the link;
its operations run again when backward asks for it. What is stored for that alone (anchors) becomes
slots of its own. So any plan is predicted from the one recording.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from weakref import WeakValueDictionary

from hf_pyao.plan.documents.plan import OFFLOAD, RECOMPUTE
from hf_pyao.plan.step.dropped_layer import Draft, DroppedLayer
from hf_pyao.plan.step.prediction import Coded, Rebuild
from hf_pyao.plan.step.step_layers import StepLayers
from hf_pyao.plan.step.step_program import SlotUse, StepProgram


@dataclass(frozen=True)
class PlannedStep:
    """What :func:`~hf_pyao.plan.predict.predict.predict` takes."""

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
    num_checkpointed: int = 0
    """First layers that run again as a whole."""

    @property
    def rebuild_ms(self) -> float:
        """What is computed again in all."""
        return sum(rebuild.elapsed_ms for rebuild in self.rebuilds.values())

    def streaming_as(self, recorded: StepProgram) -> PlannedStep:
        """Return the step with those weights streamed that *recorded*, the step without a plan, has
        streamed."""
        program = self.program
        if program.streamed is recorded.streamed:
            return self
        streaming = dataclasses.replace(
            program,
            residents=recorded.residents,
            resident_bytes=recorded.resident_bytes,
            streamed=recorded.streamed,
        )
        vars(streaming)["table"] = program.table
        return dataclasses.replace(self, program=streaming)


_PLANNED_BY = ("operations", "buffers", "slots", "segments", "graph", "labels")
"""What of a step a plan is carried out in."""


class StepPlanner(StepLayers):
    """Carries out plans in a recorded step; see :class:`StepLayers`."""

    @cached_property
    def _planned(self) -> WeakValueDictionary[tuple[object, ...], PlannedStep]:
        """By what they do, as long as someone has them: links and windows share them."""
        return WeakValueDictionary()

    def streaming(self, program: StepProgram) -> StepPlanner:
        """Return the planner for *program*, the same step with other weights streamed.

        What is planned is shared, unless other operations run.
        """
        if any(getattr(program, name) is not getattr(self.program, name) for name in _PLANNED_BY):
            return StepPlanner(program, self.times_ms, self._rebuild_factor, self._min_bytes)
        other = copy.copy(self)
        other.program = program
        other._planned = self._planned
        return other

    def plan(
        self,
        actions: Sequence[str],
        products: Collection[str] = (),
        otherwise: Sequence[str] | None = None,
        coded: Mapping[int, Coded] | None = None,
        num_checkpointed: int = 0,
    ) -> PlannedStep:
        """Return the step with *actions* carried out.

        Args:
            actions: for each slot, one of ``keep``, ``offload``, ``recompute``.
            products: sub-modules whose matrix products and attention may run again.
            otherwise: for each slot, what becomes of it where it cannot be recomputed, and of what
                is stored to rebuild it; None: it is offloaded.
            coded: slots that a codec writes smaller where they leave, by number.
            num_checkpointed: first layers that run again as a whole: all that is recomputed of
                one is there at once.
        """
        otherwise = tuple(otherwise or (OFFLOAD,) * len(self.program.slots))
        rebuilt: tuple[object, ...] = ()
        if RECOMPUTE in actions:
            rebuilt = (frozenset(products), otherwise, num_checkpointed)
        key = (tuple(actions), rebuilt, tuple((coded or {}).items()))
        planned = self._planned.get(key)
        if planned is None:
            planned = self._plan(actions, frozenset(products), otherwise, coded, num_checkpointed)
            self._planned[key] = planned
        return planned.streaming_as(self.program)

    def _plan(
        self,
        actions: Sequence[str],
        products: frozenset[str],
        otherwise: Sequence[str],
        coded: Mapping[int, Coded] | None,
        num_checkpointed: int,
    ) -> PlannedStep:
        """Carry out what :meth:`plan` does not know of yet."""
        program = self.program
        draft = Draft(program, otherwise)
        refused: dict[int, set[str]] = {}
        for layer, numbers in self._by_layer.items():
            dropped = frozenset(
                program.slots[n].name
                for n in numbers
                if actions[n] == RECOMPUTE and program.slots[n].stays is None
            )
            if not dropped or self._search is None:
                continue
            recipe = self._recipe(numbers, dropped, products, is_whole=layer < num_checkpointed)
            refused[layer] = recipe.refused
            DroppedLayer(self, layer, recipe, draft).run()
        slots: list[SlotUse] = []
        all_leaves: list[bool] = []
        rebuilds: dict[int, Rebuild] = {}
        all_coded: dict[int, Coded] = {}
        stored: dict[int, int] = {}
        for number, slot in enumerate(draft.slots):
            for key, anchor, anchor_leaves in draft.anchors.get(number, ()):
                stored[key] = len(slots)
                slots.append(anchor)
                all_leaves.append(anchor_leaves)
            if number in draft.is_anchor:
                continue
            action = actions[number]
            if number in draft.rebuilds:
                rebuilds[len(slots)] = draft.rebuilds[number]
            else:
                stored[number] = len(slots)
                if action == RECOMPUTE:
                    action = self.stored(draft.otherwise[number], slot.nbytes)
            leaves = action == OFFLOAD and slot.stays is None
            if leaves and coded and number in coded:
                all_coded[len(slots)] = coded[number]
            slots.append(slot)
            all_leaves.append(leaves)
        planned = dataclasses.replace(
            program, slots=tuple(slots), buffers=tuple(draft.buffers), labels=draft.labels
        )
        changed = {number: draft.buffers[number] for number in draft.changed}
        vars(planned)["table"] = program.table.with_buffers(changed)  # sooner than all anew
        return PlannedStep(
            planned,
            all_leaves,
            {number: _reading(rebuild, stored) for number, rebuild in rebuilds.items()},
            self.times_ms,
            all_coded,
            {layer: names for layer, names in refused.items() if names},
            num_checkpointed,
        )


def _reading(rebuild: Rebuild, stored: Mapping[int, int]) -> Rebuild:
    """Return *rebuild* with what it reads by numbers of the planned step."""
    return Rebuild(
        tuple(
            each._replace(reads=tuple(stored[key] for key in each.reads if key in stored))
            for each in rebuild.operations
        )
    )
