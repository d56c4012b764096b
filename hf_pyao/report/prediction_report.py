"""``PredictionReport``: a profiled step under plans, beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from hf_pyao.report.provenance import Provenance
from hf_pyao.report.schema import JsonDocument
from hf_pyao.report.view import Table, View

SCHEMA_VERSION = 1
"""Version of the JSON of a :class:`PredictionReport`."""

KIND = "prediction"
ABSENT = "–"
MEMORY = ("allocated, GB", "reserved, GB", "host, GB")
"""Columns of memory."""


@dataclass(frozen=True, kw_only=True)
class PredictedPlan:
    """What a step comes to under one plan. Sizes are in bytes."""

    name: str
    step_ms: float
    """Forward, loss and backward of the micro-batch."""
    compute_ms: float
    """The same without waiting for copies."""
    stall_forward_ms: float
    stall_backward_ms: float
    peak_bytes: int
    """Most that is allocated at once, with weights and gradients, for copies that are always
    late."""
    reserved_bytes: int | None = None
    """What the device's allocator reserves; None where that was not looked at."""
    peak_where: str
    """Phase and layer of the peak."""
    peak_tensor: str
    """The tensor without which the peak would be lowest."""
    next_peak_bytes: int
    """The peak without it."""
    fits: bool | None = None
    """Whether it fits into the device's memory; None if that was not said."""
    host_bytes: int
    """Activations on the host at once: all of it is pinned where there is a device."""
    offloaded_bytes: int


@dataclass(frozen=True, kw_only=True)
class ComparedFigure:
    """A figure that was measured, and what was predicted for it."""

    name: str
    unit: str
    measured: float
    predicted: float


@dataclass(frozen=True, kw_only=True)
class PredictionReport(JsonDocument):
    """A profiled step under plans: predicted, and as it was measured."""

    called: ClassVar[str] = "the prediction"
    schema_version: int = SCHEMA_VERSION
    kind: str = KIND
    title: str
    summary: str
    """What the times and speeds are."""
    profile: dict[str, Any]
    """What the profile is of."""
    plans: list[PredictedPlan]
    compared: list[ComparedFigure] = field(default_factory=list)
    """For the policy under which it was profiled; empty where nothing was measured."""
    notes: list[str] = field(default_factory=list)
    provenance: Provenance


def prediction_view(report: PredictionReport) -> View:
    """Return plans, and the comparison."""
    tables = [
        Table(
            ["plan", "step, ms", "compute, ms", "stalls, ms", *MEMORY, "leaves, GB"],
            [
                [
                    plan.name,
                    f"{plan.step_ms:,.2f}",
                    f"{plan.compute_ms:,.2f}",
                    f"{plan.stall_forward_ms + plan.stall_backward_ms:,.2f}",
                    f"{plan.peak_bytes / 1e9:.3f}",
                    _reserved(plan) + (" (too much)" if plan.fits is False else ""),
                    f"{plan.host_bytes / 1e9:.3f}",
                    f"{plan.offloaded_bytes / 1e9:.3f}",
                ]
                for plan in report.plans
            ],
        )
    ]
    if report.compared:
        tables.append(
            Table(
                ["as it was profiled", "measured", "predicted", "difference"],
                [
                    [
                        f"{each.name}, {each.unit}",
                        f"{each.measured:,.6g}",
                        f"{each.predicted:,.6g}",
                        _difference(each),
                    ]
                    for each in report.compared
                ],
            )
        )
    causes = [
        f"{plan.name}: the peak is set by {plan.peak_tensor}, in {plan.peak_where}; without it, it "
        f"would be {plan.next_peak_bytes / 1e9:.3f} GB."
        for plan in report.plans
    ]
    return View(
        title=report.title,
        summary=report.summary,
        tables=tables,
        notes=[*dict.fromkeys(causes), *report.notes],
        provenance=report.provenance,
    )


def _reserved(plan: PredictedPlan) -> str:
    return ABSENT if plan.reserved_bytes is None else f"{plan.reserved_bytes / 1e9:.3f}"


def _difference(figure: ComparedFigure) -> str:
    if not figure.measured:
        return ABSENT if figure.predicted else "0.0 %"
    return f"{(figure.predicted / figure.measured - 1):+.1%}".replace("%", " %")
