"""A chosen plan as a document, with the reason for each slot in words."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from hf_pyao.levers import Levers
from hf_pyao.metrics import format_bytes
from hf_pyao.plan.documents.plan import (
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    LeverSetting,
    Plan,
    PlannedSlot,
    PlanPoint,
)
from hf_pyao.plan.documents.plan_facts import NO_FACTS, PlanFacts
from hf_pyao.plan.options.chosen_levers import ChosenLevers
from hf_pyao.plan.solve.candidate import FIRST_RUN_AGAIN, KEEP_ALL, PLANNED, Candidate
from hf_pyao.plan.solve.conditions import Conditions, chosen_slots
from hf_pyao.plan.solve.planner import Planner
from hf_pyao.settings.removed import REMOVED_SETTINGS

SOURCE = "policy auto"


def plan_of(
    planner: Planner,
    chosen: Candidate,
    *,
    limit_bytes: float | None = None,
    model: Mapping[str, Any] | None = None,
    facts: PlanFacts = NO_FACTS,
    figures: Mapping[str, float] | None = None,
    num_front_points: int = 0,
    levers: ChosenLevers | None = None,
) -> Plan:
    """Return *chosen* as a document.

    Args:
        planner: has chosen it.
        chosen: what was chosen.
        limit_bytes: most bytes on the device, if that was given.
        model: what tells the model; None: any.
        facts: what is known of the run that the plan is for.
        figures: more figures to show.
        num_front_points: how many budgets are solved for the front; 0: it has what is known.
        levers: what it was chosen with, and from; None: nothing is said of them.
    """
    program, conditions = planner.program, planner.conditions
    configured = levers.configured if levers else planner
    decided = {
        number
        for layer in range(program.num_layers)
        for number in chosen_slots(planner.stepper, layer, conditions.min_bytes)
        if layer >= chosen.num_checkpointed
    }
    changed = {} if levers is None else levers.levers.settings()
    if chosen.num_checkpointed:
        changed |= {"checkpoint_every": 1}
    table: defaultdict[tuple[str, str, str | None, str], list[int]] = defaultdict(list)
    for number, slot in enumerate(program.slots):
        if number in decided:
            key = (
                slot.name,
                chosen.actions[number],
                chosen.codecs[number],
                chosen.otherwise[number],
            )
            if slot.layer not in table[key]:  # as one that runs several times
                table[key].append(slot.layer)
    order = {slot.name: n for n, slot in enumerate(reversed(program.slots))}
    rows = sorted(table.items(), key=lambda row: (-order[row[0][0]], row[1]))
    reasons = _Reasons(planner, chosen, limit_bytes)
    slots = [
        PlannedSlot(
            name=name,
            action=action,
            layers=None if len(layers) == program.num_layers else layers,
            codec=codec,
            otherwise=otherwise if action == RECOMPUTE else OFFLOAD,
            reason=reasons.of(name, action, layers),
        )
        for (name, action, codec, otherwise), layers in rows
    ]
    return Plan(
        source=SOURCE if chosen.name == PLANNED else f"{SOURCE}: {chosen.name}",
        model=dict(model or {}),
        slots=slots,
        otherwise=_otherwise(chosen, conditions),
        replayed_modules=[] if chosen.num_checkpointed else sorted(chosen.products),
        facts=_facts(facts, chosen, limit_bytes, configured.kept),
        figures={**_figures(chosen, configured), **(figures or {})},
        front=_front(planner, chosen, num_front_points),
        levers=changed,
        num_checkpointed=chosen.num_checkpointed or None,
        levers_reason=levers.reason if levers else "",
        lever_settings=_lever_settings(levers) if levers else [],
    )


def _otherwise(chosen: Candidate, conditions: Conditions) -> str:
    """Return what becomes of slots that are stored to rebuild others, and of those not listed."""
    if chosen.name == KEEP_ALL or not conditions.may_offload or OFFLOAD not in chosen.otherwise:
        return KEEP
    return OFFLOAD


def plan_of_choice(chosen: ChosenLevers, **more: Any) -> Plan:
    """Return what was chosen among levers as a document; *more* as for :func:`plan_of`."""
    return plan_of(chosen.planner, chosen.candidate, levers=chosen, **more)


def _lever_settings(chosen: ChosenLevers) -> list[LeverSetting]:
    """Return the settings that were looked at; none where there was but one."""
    if len(chosen.looked_at) < 2:
        return []
    return [
        LeverSetting(
            levers=each.levers.settings(),
            words=each.levers.describe() or "the step as it is",
            step_ms=None if each.candidate is None else each.candidate.step_ms,
            peak_bytes=None if each.candidate is None else each.candidate.peak_bytes,
            host_bytes=None if each.candidate is None else each.candidate.host_bytes,
            fits=each.fits,
            is_chosen=each.levers == chosen.levers,
            note=each.note,
        )
        for each in chosen.looked_at
    ]


def _front(planner: Planner, chosen: Candidate, num_points: int) -> list[PlanPoint]:
    front = planner.front(num_points) if num_points else []
    known = dict.fromkeys([*planner.simple().values(), *front, chosen])
    return [
        PlanPoint(
            name=each.name,
            step_ms=each.step_ms,
            peak_bytes=each.peak_bytes,
            offloaded_bytes=each.timed.offloaded_bytes,
            rebuild_ms=each.step.rebuild_ms,
            is_chosen=each is chosen,
        )
        for each in sorted(known, key=lambda each: (each.peak_bytes, each.step_ms))
    ]


def _facts(
    known: PlanFacts, chosen: Candidate, limit_bytes: float | None, kept: Candidate
) -> PlanFacts:
    """Return *known* with what is predicted for *chosen*, and for *kept*: keeping everything."""
    is_limited = limit_bytes is not None and limit_bytes < math.inf
    return dataclasses.replace(
        known,
        window_bytes=chosen.window_bytes or None,
        limit_bytes=int(limit_bytes) if is_limited and limit_bytes is not None else None,
        step_ms=chosen.timed.step_ms,
        peak_bytes=chosen.peak_bytes,
        needed_bytes=int(chosen.memory.needed_within(limit_bytes or math.inf)),
        host_bytes=int(chosen.host_bytes),
        kept_step_ms=kept.step_ms,
        kept_peak_bytes=kept.peak_bytes,
    )


def _figures(chosen: Candidate, configured: Planner) -> dict[str, float]:
    timed = chosen.timed
    found = {
        "compute_ms": timed.compute_ms,
        "rebuild_ms": chosen.step.rebuild_ms,
        "stall_forward_ms": timed.stall_forward_ms,
        "stall_backward_ms": timed.stall_backward_ms,
        "offloaded_bytes": float(timed.offloaded_bytes),
        "keep_last_layers": float(chosen.keep_last_layers),
    }
    for name, candidate in configured.simple().items():
        if name != KEEP_ALL:  # that one is a fact
            found[f"step_ms/{name}"] = candidate.step_ms
            found[f"peak_bytes/{name}"] = float(candidate.peak_bytes)
    return found


class _Reasons:
    """Says of each slot why."""

    def __init__(self, planner: Planner, chosen: Candidate, limit_bytes: float | None) -> None:
        self._planner = planner
        self._fits = limit_bytes is None or chosen.memory.fits(limit_bytes)
        self._chosen = chosen
        self._link = planner.conditions.link
        program = planner.program
        self._nbytes = {(slot.name, slot.layer): slot.nbytes for slot in program.slots}
        self._rebuild_ms: defaultdict[str, list[float]] = defaultdict(list)
        for number, rebuild in chosen.step.rebuilds.items():
            slot = chosen.step.program.slots[number]
            self._rebuild_ms[slot.name].append(rebuild.elapsed_ms)
        stall_ms = chosen.timed.stall_forward_ms + chosen.timed.stall_backward_ms
        self._hides = stall_ms <= 0.005 * chosen.timed.step_ms

    def of(self, name: str, action: str, layers: list[int]) -> str:
        """Return the reason for what becomes of *name* in *layers*."""
        nbytes = self._nbytes[name, layers[0]]
        size = f"{nbytes / 2**20:.1f} MiB"
        copy_ms = self._link.copy_ms("offload", nbytes)
        if action == KEEP:
            return self._why_kept(layers, size)
        if action == OFFLOAD:
            hides = "hide under compute" if self._hides else "cost less than all else"
            return f"its copies ({size}, {copy_ms:.2f} ms each way) {hides}"
        found = self._rebuild_ms.get(name, [])
        rebuild_ms = sum(found) / len(found) if found else 0.0
        if rebuild_ms <= copy_ms:
            return f"rebuilt in {rebuild_ms:.3f} ms; its copy would take {copy_ms:.2f} ms each way"
        return (
            f"rebuilt in {rebuild_ms:.3f} ms: the link has no room for its copies "
            f"({copy_ms:.2f} ms each way)"
        )

    def _why_kept(self, layers: list[int], size: str) -> str:
        num_layers = self._planner.program.num_layers
        first_kept = num_layers - self._chosen.keep_last_layers
        if self._chosen.name == KEEP_ALL:
            return "everything fits" if self._fits else "no plan has a lower peak"
        if min(layers) >= first_kept:
            return "backward begins with it"
        return f"there is room for {size} of {len(layers)} layers"


def described_levers(plan: Plan) -> str:
    """Say in words what changes the step itself; empty if nothing does, or it is not known."""
    levers = {
        name: value
        for name, value in plan.levers.items()
        if value is not None and name not in REMOVED_SETTINGS
    }
    words, first = Levers(**levers).describe(), plan.num_checkpointed
    return words if first is None else words.replace("each layer", f"the first {first} layers")


def describe(plan: Plan) -> str:
    """Say in a few words what a plan does, and what it is predicted to come to."""
    counts: dict[str, int] = {}
    for slot in plan.slots:
        number = 1 if slot.layers is None else len(slot.layers)
        counts[slot.action] = counts.get(slot.action, 0) + number
    facts = plan.facts
    every = plan.levers.get("checkpoint_every")
    needed, limit = facts.total_bytes, facts.limit_bytes
    misfit = ""
    if limit is not None and needed > limit:
        misfit = f"; it does not fit: {format_bytes(needed)} of {format_bytes(limit)}"
    if not set(counts) - {KEEP} and plan.otherwise == KEEP and not every:
        if misfit:
            return f"it offloads nothing, since no plan has a lower peak{misfit}"
        return "it offloads nothing, since everything fits"
    name = plan.source.removeprefix(SOURCE).removeprefix(": ")
    what = name or ", ".join(
        f"{counts[action]} {word}"
        for action, word in (
            (KEEP, "tensors kept"),
            (OFFLOAD, "offloaded"),
            (RECOMPUTE, "recomputed"),
        )
        if action in counts
    )
    changes = described_levers(plan)
    if changes:
        # What runs again is not kept: of each segment its input is.
        is_kept = every and name in (KEEP_ALL, FIRST_RUN_AGAIN)
        what = f"{changes}, nothing is offloaded" if is_kept else f"{changes}: {what}"
    if facts.step_ms is not None and facts.kept_step_ms:
        what += (
            f"; predicted peak {format_bytes(facts.peak_bytes or 0)} instead of "
            f"{format_bytes(facts.kept_peak_bytes or 0)}, time "
            f"{facts.step_ms / facts.kept_step_ms - 1:+.1%}"
        )
    return what + misfit
