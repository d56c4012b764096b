"""The plot of an estimate: each way's largest micro-batch, and its speed there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_pyao.plan.documents.estimate import EstimateReport
from hf_pyao.tools.report.plots.look import LIGHT, MOST_ROWS, NOTHING, OURS, RECOMPUTE, Family, Look

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def estimate_figure(report: EstimateReport, look: Look = LIGHT) -> Figure | None:
    """Return the plot of an estimate; None if it has no rows."""
    rows = report.rows[:MOST_ROWS]
    if not rows:
        return None
    figure, (left, right) = look.two_axes(9.6, 1.8 + 0.34 * len(rows))
    for axes, values, label in (
        (
            left,
            [float(row.largest_micro_batch) for row in rows],
            "largest micro-batch, samples (estimated)",
        ),
        (right, [row.tokens_per_s for row in rows], "tokens/s there (estimated)"),
    ):
        shown = [
            (row.method, value, look.colour(_family_of_way(row.method)))
            for row, value in zip(rows, values, strict=True)
        ]
        look.bars(axes, shown, [f"{value:,.0f}" for value in values])
        axes.set_xlabel(look.wrapped(label, 26))
    if not look.is_narrow:
        right.set_yticks(range(len(rows)), [""] * len(rows))
        figure.suptitle(look.plain(report.title), color=look.ink, fontsize=11)
    return figure


def _family_of_way(method: str) -> Family:
    if method.startswith("policy"):
        return OURS
    return RECOMPUTE if method.startswith("checkpointing") else NOTHING
