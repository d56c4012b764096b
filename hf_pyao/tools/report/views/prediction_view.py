"""What predictions show: a row for each plan, and measured figures beside predicted ones."""

from __future__ import annotations

from hf_pyao.plan.documents.prediction import ComparedFigure, PredictionReport
from hf_pyao.quantities import ABSENT
from hf_pyao.tools.report.views.view import Table, View, cell

MEMORY = ("allocated, GB", "reserved, GB", "host, GB")
"""Columns of memory."""


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
                    cell(plan.reserved_bytes, ".3f", 1e9)
                    + (" (too much)" if plan.fits is False else ""),
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


def _difference(figure: ComparedFigure) -> str:
    if not figure.measured:
        return ABSENT if figure.predicted else "0.0 %"
    return f"{(figure.predicted / figure.measured - 1):+.1%}".replace("%", " %")
