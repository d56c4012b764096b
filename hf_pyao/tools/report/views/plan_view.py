"""What a plan shows: what becomes of each slot, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from hf_pyao.plan.documents.plan import ACTIONS, LeverSetting, Plan, PlannedSlot
from hf_pyao.plan.documents.plan_facts import KEEP_EVERYTHING
from hf_pyao.quantities import ABSENT, GIB, MIB, fact_text, number
from hf_pyao.tools.report.plots import data as plots
from hf_pyao.tools.report.views.view import Table, View, cell

PLANNED = "planned"
"""Name of points that the solver proposed; the others have names of their own."""

MOST_LAYERS = 100_000
"""Most layers that a plan is taken to be for: a file may say anything."""

_LABELS = {
    "kept_step_ms": f"step_ms/{KEEP_EVERYTHING}",
    "kept_peak_bytes": f"peak_bytes/{KEEP_EVERYTHING}",
}
"""Figures that are shown beside those of the other plans that were looked at, and like them."""


def plan_view(plan: Plan) -> View:
    """Return a plan's slots, its figures, and what becomes of the rest."""
    tables = [
        Table(["slot", "action", "layers", "codec", "why", "MiB"], _slot_rows(plan), 5),
        Table(
            ["what was looked at", "step, ms", "peak, GB", "leaves, GB", "rebuilt, ms"],
            _front_rows(plan),
        ),
        Table(["levers that were looked at", *_LEVER_COLUMNS], _lever_rows(plan), 2),
        Table(
            ["figure", "value"],
            [[_LABELS.get(name, name), number(v)] for name, v in plan.numbers().items()],
        ),
        Table(["made for", ""], [[name, fact_text(v)] for name, v in plan.model.items()], 2),
    ]
    return View(
        title=plan.title,
        summary=_summary(plan),
        plots=_plots(plan),
        tables=[table for table in tables if table.rows],
    )


_FAMILIES = dict(zip(ACTIONS, (plots.RECOMPUTE, plots.OURS, plots.OFFLOAD), strict=True))


def _plots(plan: Plan) -> list[list[plots.Plot]]:
    """Return time over peak of what was looked at; else the bytes of each action as bars."""
    if len(plan.front) > 1:
        return [[_front(plan)]]
    sizes = bytes_by_action(plan)
    if not sizes:
        return []
    scale, unit = (GIB, "GiB") if max(sizes.values()) >= GIB else (MIB, "MiB")
    bars = [
        plots.Bar(action, size / scale, _FAMILIES[action], number(size / scale))
        for action, size in sizes.items()
    ]
    per = "micro-batch" if num_layers(plan) > 1 else "layer, or named layers"
    return [[plots.Bars(bars=bars, x_label=f"{unit} of the named slots, per {per}")]]


def _front(plan: Plan) -> plots.Front:
    """Return time over peak, with the chosen plan and the limit marked."""
    points = plan.front[: plots.MOST_POINTS]
    lines = []
    for name in dict.fromkeys(point.name for point in points):
        mine = [point for point in points if point.name == name]
        family = (
            plots.RECOMPUTE
            if "checkpoint" in name
            else plots.OURS
            if name == PLANNED
            else plots.OFFLOAD
        )
        peaks = [point.peak_bytes / GIB for point in mine]
        lines.append(plots.Line(name, family, peaks, [point.step_ms for point in mine]))
    chosen = next((point for point in points if point.is_chosen), None)
    limit = plan.facts.limit_bytes or 0
    is_near = 0 < limit <= 1.5 * max(point.peak_bytes for point in points)
    return plots.Front(
        lines=lines,
        x_label="predicted peak on the device, GiB",
        y_label="predicted step, ms",
        marked=None if chosen is None else (chosen.peak_bytes / GIB, chosen.step_ms, "chosen"),
        x_limit=limit / GIB if is_near else None,
    )


def bytes_by_action(plan: Plan) -> dict[str, float]:
    """Return the bytes of a micro-batch for each action, as far as the plan holds sizes.

    A slot of all layers counts once for each, where the plan says how many there are.
    """
    found: dict[str, float] = {}
    for action in ACTIONS:
        sized = [s for s in plan.slots if s.action == action and s.nbytes is not None]
        if sized:
            found[action] = sum(float(s.nbytes or 0) * _num_layers(plan, s) for s in sized)
    return found


def _num_layers(plan: Plan, slot: PlannedSlot) -> int:
    if slot.layers is not None:
        return len(slot.layers)
    named = {name for s in plan.slots if s.name == slot.name for name in s.layers or ()}
    return max(0, num_layers(plan) - len(named))


def num_layers(plan: Plan) -> int:
    """Return the layers of the model that the plan is for; 1 if it does not say."""
    count = plan.model.get("num_layers")
    is_count = isinstance(count, int) and not isinstance(count, bool) and 0 < count <= MOST_LAYERS
    return count if is_count and isinstance(count, int) else 1


def _summary(plan: Plan) -> str:
    said = [f"{len(plan.slots)} slots are named; what is not named: {plan.otherwise}."]
    if plan.recomputed_modules:
        said.append(f"Recomputed modules: {', '.join(plan.recomputed_modules)}.")
    if plan.levers_reason:
        said.append(f"Levers: {plan.levers_reason.rstrip('.')}.")
    if not plan.model:
        said.append("It holds for any model that has these slots.")
    return " ".join(said)


def _front_rows(plan: Plan) -> list[list[str]]:
    return [
        [
            f"{point.name} (chosen)" if point.is_chosen else point.name,
            f"{point.step_ms:,.2f}",
            f"{point.peak_bytes / 1e9:.3f}",
            f"{point.offloaded_bytes / 1e9:.3f}",
            f"{point.rebuild_ms:,.2f}",
        ]
        for point in plan.front
    ]


_LEVER_COLUMNS = ("note", "step, ms", "peak, GB", "host, GB", "fits")


def _lever_rows(plan: Plan) -> list[list[str]]:
    """Return a row for each setting that was recorded, and one for all others of one reason."""
    alike: dict[str, list[LeverSetting]] = {}
    for setting in plan.lever_settings:
        if setting.step_ms is None:
            alike.setdefault(setting.note, []).append(setting)
    others = [
        dataclasses.replace(first, words=f"{first.words}, and {len(more)} more") if more else first
        for first, *more in alike.values()
    ]
    recorded = [setting for setting in plan.lever_settings if setting.step_ms is not None]
    return [
        [
            f"{setting.words} (chosen)" if setting.is_chosen else setting.words,
            setting.note or ABSENT,
            cell(setting.step_ms, ",.2f"),
            cell(setting.peak_bytes, ".3f", 1e9),
            cell(setting.host_bytes, ".3f", 1e9),
            ABSENT if setting.step_ms is None else ("yes" if setting.fits else "no"),
        ]
        for setting in (*recorded, *others)
    ]


def plans_side_by_side(plans: Mapping[str, Plan]) -> View:
    """Return two or more plans, slot by slot and figure by figure; what is equal is left out."""
    names = list(plans)
    slots = dict.fromkeys(slot.name for plan in plans.values() for slot in plan.slots)
    rows = [[name, *(_actions_of(plans[each], name) for each in names)] for name in slots]
    numbers = {name: plan.numbers() for name, plan in plans.items()}
    values = [
        [
            _LABELS.get(name, name),
            *(number(of[name]) if name in of else ABSENT for of in numbers.values()),
        ]
        for name in dict.fromkeys(name for of in numbers.values() for name in of)
    ]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    return View(
        title="Plans side by side",
        summary=(
            f"{len(rows) - len(differing)} of {len(rows)} slots are treated alike in all of them."
        ),
        tables=[
            table
            for table in (
                Table(["slot", *names], differing, 1 + len(names)),
                Table(["figure", *names], [row for row in values if len(set(row[1:])) > 1]),
            )
            if table.rows
        ],
    )


def _actions_of(plan: Plan, name: str) -> str:
    found = [
        f"{slot.action} {'all' if slot.layers is None else ranges(slot.layers)}"
        for slot in plan.slots
        if slot.name == name
    ]
    return "; ".join(found) or f"{plan.otherwise} (not named)"


def _slot_rows(plan: Plan) -> list[list[str]]:
    return [
        [
            slot.name,
            slot.action,
            "all" if slot.layers is None else ranges(slot.layers),
            slot.codec or ABSENT,
            slot.reason or ABSENT,
            cell(slot.nbytes, ",.2f", MIB),
        ]
        for slot in plan.slots
    ]


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers in order, runs of three and more as their ends: ``0–5, 7``."""
    runs: list[list[int]] = []
    for each in sorted(set(numbers)):
        if runs and each == runs[-1][1] + 1:
            runs[-1][1] = each
        else:
            runs.append([each, each])
    parts = []
    for first, last in runs:
        if last == first:
            parts.append(str(first))
        else:
            parts.append(f"{first}–{last}" if last - first > 1 else f"{first}, {last}")
    return ", ".join(parts)
