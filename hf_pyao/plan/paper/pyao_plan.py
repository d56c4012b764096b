"""The plan of PyAO's rule (PyAO paper, sections 4.4, 4.5 and 5.4).

What a flagged sub-module saves is recomputed, even if another one saved it first: a projection
saves the result of the activation in front of it, which the activation may have saved already.
Recomputation goes back through all operations, matrix products too, until it reaches stored values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_pyao.plan.documents.plan import RECOMPUTE, Plan, PlannedSlot
from hf_pyao.plan.step.step_program import StepProgram

SOURCE = "PyAO's rule (PyAO paper, section 4.4)"


def plan_of_rule(
    flagged: Sequence[str],
    saved: Mapping[str, Iterable[str]],
    paths: Iterable[str],
    *,
    model: Mapping[str, Any] | None = None,
    figures: Mapping[str, float] | None = None,
) -> Plan:
    """Return the plan that recomputes what flagged sub-modules save, and offloads the rest.

    Args:
        flagged: sub-modules, by path.
        saved: for each sub-module the slots that it saves, first or again.
        paths: sub-modules of a layer, whose products may run again.
        model: what tells the model; None: any.
        figures: what it was computed from.
    """
    names: dict[str, str] = {}
    for path in flagged:
        for name in saved.get(path, ()):
            names.setdefault(name, path)
    return Plan(
        source=SOURCE,
        model=dict(model or {}),
        slots=[
            PlannedSlot(name=name, action=RECOMPUTE, reason=f"{path} is flagged")
            for name, path in names.items()
        ],
        replayed_modules=sorted({*paths, ""}) if names else [],
        figures=dict(figures or {}),
    )


def saved_by(program: StepProgram, layer: int = 1) -> dict[str, list[str]]:
    """Return the slots that each sub-module of a recorded layer saves, first or again."""
    found: dict[str, dict[str, None]] = {}
    for pack in program.packs:
        if pack.layer == layer and pack.slot:
            found.setdefault(pack.path, {})[pack.slot] = None
    return {path: list(names) for path, names in found.items()}


def paths_of(program: StepProgram, layer: int = 1) -> set[str]:
    """Return the sub-modules of a recorded layer that run operations."""
    return {
        operation.path
        for segment in program.segments
        if segment.layer == layer
        for operation in program.operations[segment.start : segment.end]
    }
