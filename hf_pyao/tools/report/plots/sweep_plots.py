"""The plots of a sweep: memory over budgets, and throughput over memory with the knee marked."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from hf_pyao.plan.documents.sweep import BYTES, Spread, SweepReport, SweepRow
from hf_pyao.quantities import GIB, MIB
from hf_pyao.tools.report.plots.labels import place_labels
from hf_pyao.tools.report.plots.look import INK, MOST_ROWS, OURS, RECOMPUTE, plain, two_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LABELS = 12
"""Most points of the trade-off that are labelled beside the knee and the ends."""


def sweep_figure(report: SweepReport) -> Figure | None:
    """Return the plots of a sweep; None if fewer than two budgets have figures.

    The left one is NeuroCache's Figure 4, the right one its Figure 6. Bars are standard deviations
    over seeds.
    """
    rows = [row for row in report.rows if row.memory_bytes and row.tokens_per_s][:MOST_ROWS]
    if len(rows) < 2:
        return None
    figure, (left, right), _ = two_axes(11.0, [4.6], (1, 1))
    most = max(row.memory_bytes.mean for row in rows if row.memory_bytes)
    unit, name = (GIB, "GiB") if most >= 10 * GIB else (MIB, "MiB")
    _memory(left, report, rows, unit)
    left.set_ylabel(f"memory, {name}")
    _trade_off(right, report, rows, unit)
    right.set_xlabel(f"memory, {name}: less to the left")
    right.set_ylabel("tokens/s")
    left.set_title("memory over the budget", loc="left", fontsize=10, color=INK)
    right.set_title("throughput over memory", loc="left", fontsize=10, color=INK)
    figure.suptitle(plain(report.title, 110), color=INK, fontsize=11)
    place_labels(figure, right, _labels(report, rows, unit), _line(rows, unit))
    return figure


def _memory(axes: Axes, report: SweepReport, rows: list[SweepRow], unit: float) -> None:
    scale = MIB if report.budgets_are == BYTES else 1
    means = [_mean(row.memory_bytes) / unit for row in rows]
    axes.errorbar(
        [row.budget / scale for row in rows],
        means,
        yerr=[_deviation(row.memory_bytes) / unit for row in rows],
        color=OURS.colour,
        marker=OURS.marker,
        markersize=5,
        capsize=3,
    )
    knee = _knee(report, rows)
    if knee is not None:
        axes.scatter(
            [knee.budget / scale],
            [_mean(knee.memory_bytes) / unit],
            s=150,
            facecolor="none",
            edgecolor=RECOMPUTE.colour,
            linewidth=2,
            zorder=4,
        )
    what = "MiB" if report.budgets_are == BYTES else "tensors"
    axes.set_xlabel(f"budget of a forward, {what}")


def _trade_off(axes: Axes, report: SweepReport, rows: list[SweepRow], unit: float) -> None:
    ordered = sorted(rows, key=lambda row: _mean(row.memory_bytes))
    axes.errorbar(
        [_mean(row.memory_bytes) / unit for row in ordered],
        [_mean(row.tokens_per_s) for row in ordered],
        xerr=[_deviation(row.memory_bytes) / unit for row in ordered],
        yerr=[_deviation(row.tokens_per_s) for row in ordered],
        color=OURS.colour,
        marker=OURS.marker,
        markersize=5,
        capsize=3,
        linewidth=1,
    )
    knee = _knee(report, rows)
    if knee is not None:
        axes.scatter(
            [_mean(knee.memory_bytes) / unit],
            [_mean(knee.tokens_per_s)],
            s=150,
            facecolor="none",
            edgecolor=RECOMPUTE.colour,
            linewidth=2,
            zorder=4,
            label="knee",
        )
        axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower right")
    axes.margins(x=0.12, y=0.15)


def _labels(
    report: SweepReport, rows: list[SweepRow], unit: float
) -> list[tuple[float, float, str, str]]:
    """Return where budgets are named: all of a few, else the ends, the knee, and some between."""
    every = max(1, -(-len(rows) // MOST_LABELS))
    shown = [
        row
        for number, row in enumerate(rows)
        if number % every == 0 or row is rows[-1] or row.budget == report.knee
    ]
    scale, ending = (MIB, " MiB") if report.budgets_are == BYTES else (1, "")
    return [
        (
            _mean(row.memory_bytes) / unit,
            _mean(row.tokens_per_s),
            f"{row.budget / scale:,.0f}{ending}",
            RECOMPUTE.colour if row.budget == report.knee else INK,
        )
        for row in shown
    ]


def _line(rows: list[SweepRow], unit: float) -> list[tuple[float, float, float]]:
    """Return places along the curve, for labels to keep off, as lines without a length."""
    points = sorted((_mean(row.memory_bytes) / unit, _mean(row.tokens_per_s)) for row in rows)
    return [
        (x, x, y0 + share * (y1 - y0))
        for (x0, y0), (x1, y1) in itertools.pairwise(points)
        for share in (0.2, 0.4, 0.6, 0.8)
        for x in (x0 + share * (x1 - x0),)
    ]


def _knee(report: SweepReport, rows: list[SweepRow]) -> SweepRow | None:
    return next((row for row in rows if row.budget == report.knee), None)


def _mean(spread: Spread | None) -> float:
    return 0.0 if spread is None else spread.mean


def _deviation(spread: Spread | None) -> float:
    """Return the standard deviation, which is not negative whatever a report says."""
    return 0.0 if spread is None else max(0.0, spread.standard_deviation)
