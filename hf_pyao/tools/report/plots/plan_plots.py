"""The plot of a plan: bytes by action."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_pyao.plan.documents.plan import KEEP, OFFLOAD, RECOMPUTE, Plan
from hf_pyao.quantities import GIB, MIB, number
from hf_pyao.tools.report.plots import look
from hf_pyao.tools.report.plots.look import INK, SOFT, bars, new_figure, plain
from hf_pyao.tools.report.views.plan_view import bytes_by_action, num_layers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_POINTS = 200
"""Most points of a front that are drawn."""

PLANNED = "planned"
"""Name of points that the solver proposed; the others have names of their own."""

_FAMILIES = {KEEP: look.RECOMPUTE, OFFLOAD: look.OURS, RECOMPUTE: look.OFFLOAD}


def plan_figure(plan: Plan) -> Figure | None:
    """Return time over peak of what was looked at; else the bytes of each action as bars.

    None if the plan holds neither.
    """
    if len(plan.front) > 1:
        return _front_figure(plan)
    sizes = bytes_by_action(plan)
    if not sizes:
        return None
    figure, axes = new_figure(8.6, 1.3 + 0.34 * len(sizes))
    scale, unit = (GIB, "GiB") if max(sizes.values()) >= GIB else (MIB, "MiB")
    rows = [(action, size / scale, _FAMILIES[action].colour) for action, size in sizes.items()]
    bars(axes, rows, [number(value) for _, value, _ in rows])
    per = "micro-batch" if num_layers(plan) > 1 else "layer, or named layers"
    axes.set_xlabel(f"{unit} of the named slots, per {per}")
    return figure


def _front_figure(plan: Plan) -> Figure:
    """Draw time over peak, with the chosen plan and the limit marked."""
    points = plan.front[:MOST_POINTS]
    figure, axes = new_figure(8.6, 4.4)
    solved = [point for point in points if point.name == PLANNED]
    if solved:
        axes.plot(
            [point.peak_bytes / GIB for point in solved],
            [point.step_ms for point in solved],
            color=look.OURS.colour,
            marker=look.OURS.marker,
            markersize=4,
            linewidth=1.2,
            label="planned",
        )
    for number_of_point, point in enumerate(p for p in points if p.name != PLANNED):
        family = look.RECOMPUTE if "checkpoint" in point.name else look.OFFLOAD
        axes.scatter(
            [point.peak_bytes / GIB],
            [point.step_ms],
            color=family.colour,
            marker="sDv^<>"[number_of_point % 6],
            s=36,
            zorder=3,
            label=plain(point.name, 48),
        )
    for point in points:
        if point.is_chosen:
            axes.scatter(
                [point.peak_bytes / GIB],
                [point.step_ms],
                s=150,
                facecolors="none",
                edgecolors=INK,
                linewidths=1.6,
                zorder=4,
                label="chosen",
            )
    limit = plan.facts.limit_bytes or 0
    most = max(point.peak_bytes for point in points)
    if 0 < limit <= 1.5 * most:
        axes.axvline(limit / GIB, color=SOFT, linestyle="--", linewidth=1.0, label="limit")
    axes.set_ylim(0, 1.1 * max(point.step_ms for point in points))
    axes.set_xlabel("predicted peak on the device, GiB")
    axes.set_ylabel("predicted step, ms")
    axes.legend(fontsize=8, frameon=False, labelcolor=INK, loc="lower left")
    return figure
