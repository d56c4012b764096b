"""The planning problem of a recorded step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.hardware.host_model import HostCosts
from hf_pyao.plan.hardware.speeds import GIB, LinkModel
from hf_pyao.plan.predict.outcome import Outcome
from hf_pyao.plan.predict.predicted_uploads import uploads_of
from hf_pyao.plan.predict.speed_range import PRESET
from hf_pyao.plan.solve.plan_problem import (
    LayerGroup,
    PlanProblem,
    RebuildStep,
    SlotChoice,
    Source,
    Way,
    way_of,
)
from hf_pyao.plan.step.collectives import without_collectives
from hf_pyao.plan.step.disk_share import DiskShare
from hf_pyao.plan.step.layer_graph import PARAMETER
from hf_pyao.plan.step.layer_recipes import Making, RecipeSearch
from hf_pyao.plan.step.planned_step import PlannedStep, StepPlanner
from hf_pyao.plan.step.step_program import BACKWARD, FORWARD, OUTSIDE, SlotUse, StepProgram

WaysOf = Callable[[SlotUse], tuple[Way, ...]]
"""How a slot may leave."""

IsForced = Callable[[str], bool]
"""Says of a slot, by name, that it is recomputed if it can be."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Under which a step is planned."""

    link: LinkModel
    window_bytes: int | None
    """As ``PyAOConfig.window``; None: ``"layer"``."""
    min_bytes: int = 65536
    """Smaller slots stay."""
    keep_last_layers: int = 1
    gradient_bytes: int = 0
    """What leaves in backward beside, for each layer."""
    may_offload: bool = True
    may_recompute: bool = True
    may_checkpoint: bool = False
    """The first layers may run again as a whole."""
    host: HostCosts | None = None
    """What a step costs the host; None: it is never slower than the device."""
    may_shrink_window: bool = True
    """A tighter window may be taken where nothing else fits."""
    may_keep_fewer: bool = True
    """Fewer last layers may be kept where nothing else fits."""
    allocator: AllocatorSettings | None = None
    """Of the device's caching allocator, by which a plan fits or not; None: what is allocated
    counts, and nothing of what an allocator reserves beside."""
    rebuild_factor: float = 1.0
    """What operations take that run again, by what they took the first time."""
    is_blocking: bool = False
    """Compute stands still while copies run, as where the host is the device."""
    placed_weights: DiskShare | None = None
    """The streamed weights that lie on a disk; None: as many as the host has no room for."""
    speed_ratios: tuple[float, ...] = PRESET
    """By which factors the link may be faster than said, for compute as said: a plan is chosen
    for its worst case over them, see ``../predict/speed_range.py``."""


def outcome_of(step: PlannedStep, conditions: Conditions) -> Outcome:
    """Return what *step* comes to under *conditions*."""
    return Outcome(
        step,
        conditions.link,
        window_bytes=conditions.window_bytes,
        allocator=conditions.allocator,
        gradient_bytes=conditions.gradient_bytes,
        is_blocking=conditions.is_blocking,
        host=conditions.host,
    )


def problem_of(
    planner: StepPlanner,
    conditions: Conditions,
    *,
    kept_bytes: float,
    host_bytes: float = float("inf"),
    ways_of: WaysOf | None = None,
    is_forced: IsForced | None = None,
) -> PlanProblem:
    """Return what there is to decide.

    Args:
        planner: has the step.
        conditions: what is given.
        kept_bytes: most bytes that stay, beside those of the last layers and of small slots.
        host_bytes: most bytes on the host.
        ways_of: how a slot may leave; None: as it is.
        is_forced: says which slots are recomputed if they can be; None: none.
    """
    program, link = planner.program, conditions.link

    def plain_way(slot: SlotUse) -> tuple[Way, ...]:
        return (way_of(slot.link_bytes, link),)

    groups = [
        _group_of(planner, layers, conditions, ways_of or plain_way, is_forced)
        for layers in groups_of(planner, conditions)
    ]
    forward_ms, backward_ms = _hidden_ms(program, planner.times_ms, conditions)
    num_layers = program.num_layers
    return PlanProblem(
        groups=tuple(groups),
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        gradient_ms=num_layers * link.copy_ms("offload", conditions.gradient_bytes)
        if conditions.gradient_bytes
        else 0.0,
        copy_engines=link.copy_engines,
        kept_bytes=kept_bytes,
        host_bytes=host_bytes,
    )


def chosen_slots(planner: StepPlanner, layer: int, conditions: Conditions) -> list[int]:
    """Return the numbers of a layer's slots of which something is decided."""
    return [
        number
        for number in planner.slots_of(layer)
        if (slot := planner.program.slots[number]).stays is None
        and slot.link_bytes > 0
        and slot.nbytes >= conditions.min_bytes
    ]


def groups_of(planner: StepPlanner, conditions: Conditions) -> list[tuple[int, ...]]:
    """Return the layers that save the same, those that are kept left out."""
    program = planner.program
    found: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for layer in range(program.num_layers - conditions.keep_last_layers):
        slots = [program.slots[number] for number in chosen_slots(planner, layer, conditions)]
        if slots:
            found[tuple((slot.name, slot.nbytes, slot.link_bytes) for slot in slots)].append(layer)
    return [tuple(layers) for layers in found.values()]


def _group_of(
    planner: StepPlanner,
    layers: tuple[int, ...],
    conditions: Conditions,
    ways_of: WaysOf,
    is_forced: IsForced | None,
) -> LayerGroup:
    layer = layers[len(layers) // 2]
    slots = [planner.program.slots[number] for number in chosen_slots(planner, layer, conditions)]
    search = planner.search if conditions.may_recompute else None
    steps = _Steps(planner, search, layer, conditions) if search is not None else None
    choices = []
    for slot in slots:
        maker = None if steps is None else steps.of_slot(slot)
        is_rebuilt = maker is not None and is_forced is not None and is_forced(slot.name)
        choices.append(
            SlotChoice(
                name=slot.name,
                nbytes=slot.nbytes,
                ways=ways_of(slot) if conditions.may_offload else (),
                maker=maker,
                is_rebuilt=is_rebuilt,
            )
        )
    return LayerGroup(
        layers=layers,
        slots=tuple(choices),
        steps=() if steps is None else tuple(steps.steps),
        sources=() if steps is None else tuple(steps.sources),
    )


class _Steps:
    """The operations of a layer that can run again, and what they need."""

    def __init__(
        self, planner: StepPlanner, search: RecipeSearch, layer: int, conditions: Conditions
    ) -> None:
        self.steps: list[RebuildStep] = []
        self.sources: list[Source] = []
        self._planner = planner
        self._search = search
        self._layer = layer
        self._conditions = conditions
        self._known: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int | None] = {}
        self._source_of: dict[int, int] = {}
        # Whatever has a slot is there in backward: kept, brought back, or rebuilt itself.
        names = {planner.program.slots[number].name for number in planner.slots_of(layer)}
        self._saved = {v for name, v in search.value_of.items() if name in names}

    def of_slot(self, slot: SlotUse) -> int | None:
        """Return the step that makes what *slot* holds; None if it cannot run again."""
        value = self._search.value_of.get(slot.name)
        making = None if value is None else self._search.maker(value)
        return None if making is None else self._step(making)

    def _step(self, making: Making) -> int | None:
        key = (making.operation, making.reads, making.makes)
        if key in self._known:
            return self._known[key]
        self._known[key] = None  # should it come round in a circle
        needs, sources = [], []
        for value in making.reads:
            if self._is_there(value):
                continue
            maker = self._search.maker(value)
            if maker is not None and not maker.is_product:
                needed = self._step(maker)
                if needed is None:
                    return None
                needs.append(needed)
                continue
            source = self._source(value, maker)
            if source is None:
                return None
            sources.append(source)
        elapsed_ms = self._planner.operation_ms(making.number, self._layer)
        self.steps.append(
            RebuildStep(
                elapsed_ms=elapsed_ms,
                needs=tuple(needs),
                sources=tuple(sources),
                path=making.path,
                is_product=making.is_product,
            )
        )
        self._known[key] = len(self.steps) - 1
        return self._known[key]

    def _is_there(self, value: int) -> bool:
        search = self._search
        return (
            value in self._saved
            or value in search.shared
            or search.graph.values[value].origin == PARAMETER
        )

    def _source(self, value: int, maker: Making | None) -> int | None:
        if value not in self._source_of:
            nbytes = self._planner.nbytes_of(self._layer, value)
            made_by = None if maker is None else self._step(maker)
            way = way_of(nbytes, self._conditions.link)
            self.sources.append(
                Source(
                    nbytes=nbytes,
                    ways=(way,) if self._conditions.may_offload else (),
                    maker=made_by,
                )
            )
            self._source_of[value] = len(self.sources) - 1
        return self._source_of[value]


def _hidden_ms(
    program: StepProgram, times_ms: Sequence[float], conditions: Conditions
) -> tuple[float, float]:
    """Return the compute under which copies to the host, and copies back, can run."""
    forward_ms = backward_ms = head_ms = 0.0
    is_behind = False
    times_ms = without_collectives(times_ms, program.operations)
    for segment in program.segments:
        elapsed_ms = sum(times_ms[segment.start : segment.end])
        if segment.layer == OUTSIDE:
            head_ms += elapsed_ms if is_behind and segment.phase == FORWARD else 0.0
        elif segment.phase == FORWARD:
            is_behind = True
            forward_ms += elapsed_ms
        elif segment.phase == BACKWARD:
            if segment.layer > 0:
                backward_ms += elapsed_ms
    if conditions.window_bytes is not None:
        # What still waits to leave when the layers are through leaves under the head.
        window_ms = conditions.window_bytes / GIB / conditions.link.d2h_gib_per_s * 1e3
        forward_ms += min(window_ms, head_ms)
    return _beside_uploads(program, forward_ms, backward_ms, conditions.link)


def _beside_uploads(
    program: StepProgram, forward_ms: float, backward_ms: float, link: LinkModel
) -> tuple[float, float]:
    """Return what streamed weights leave of the time that copies can run in.

    Less than nothing where uploads take longer than compute: what is rebuilt then fills that time.
    """
    if not program.streamed:
        return forward_ms, backward_ms
    uploads_ms = {FORWARD: 0.0, BACKWARD: 0.0}
    on_disk = frozenset(program.streamed.disk_layers)
    for phase, nbytes, layer in uploads_of(program):
        copy_ms = link.copy_ms("reload", nbytes)
        uploads_ms[phase] += max(copy_ms, link.read_ms(nbytes)) if layer in on_disk else copy_ms
    backward_ms -= uploads_ms[BACKWARD]
    if link.copy_engines == 1:
        return forward_ms - uploads_ms[FORWARD], backward_ms
    return max(forward_ms, uploads_ms[FORWARD]), backward_ms
