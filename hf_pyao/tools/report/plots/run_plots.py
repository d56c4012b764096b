"""The plot of a training run: where a micro-batch's bytes were, and what its copies cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_pyao.plan.documents.run import RunReport
from hf_pyao.quantities import GIB, MIB, number
from hf_pyao.tools.report.plots.look import LIGHT, NOTHING, OFFLOAD, OURS, QUIET, RECOMPUTE, Look
from hf_pyao.tools.report.views.run_view import RUN_FIGURES, kept_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZES = (
    ("would_hold_bytes", NOTHING),
    ("held_bytes", RECOMPUTE),
    ("offloaded_bytes", OURS),
    ("recomputed_bytes", OFFLOAD),
)
_TIMES = (
    ("transfer_ms", OURS),
    ("stall_forward_ms", RECOMPUTE),
    ("stall_backward_ms", RECOMPUTE),
)


def run_figure(report: RunReport, look: Look = LIGHT) -> Figure | None:
    """Return the plot of a run; None if it had no micro-batch."""
    if not report.totals.get("num_micro_batches"):
        return None
    num_micro_batches = max(1, report.totals["num_micro_batches"])
    labels = dict(RUN_FIGURES)

    def mean(key: str) -> float:
        return float(report.totals.get(key, 0)) / num_micro_batches

    sizes = [
        (labels[key], mean(key), look.colour(family))
        for key, family in _SIZES
        if key != "recomputed_bytes" or mean(key)
    ]
    sizes += [
        (f"kept: {reason}", mean(f"kept_bytes/{reason}"), look.colour(QUIET))
        for reason, _ in kept_rows(report)[:5]
    ]
    times = [(labels[key], mean(key), look.colour(family)) for key, family in _TIMES]
    figure, (left, right) = look.two_axes(11.0, 1.9 + 0.34 * len(sizes))
    scale, unit = (GIB, "GiB") if max(size for _, size, _ in sizes) >= GIB else (MIB, "MiB")
    _draw(left, look, [(label, size / scale, colour) for label, size, colour in sizes])
    left.set_xlabel(look.wrapped(f"{unit} per micro-batch, mean over the run", 26))
    left.set_title("saved for backward", loc="left", fontsize=10, color=look.ink)
    _draw(right, look, times)
    right.set_xlabel(look.wrapped("ms per micro-batch, mean over the run", 26))
    title = look.wrapped("copies, and compute waiting for them", 28)
    right.set_title(title, loc="left", fontsize=10, color=look.ink)
    return figure


def _draw(axes: Axes, look: Look, rows: list[tuple[str, float, str]]) -> None:
    look.bars(axes, rows, [number(value) for _, value, _ in rows])
