"""Plots of benchmarks: memory versus time, and the largest micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_pyao.plan.documents.bench import BenchReport, BenchRow
from hf_pyao.quantities import GIB
from hf_pyao.tools.report.plots.labels import place_labels
from hf_pyao.tools.report.plots.look import (
    BACK,
    FAMILIES,
    INK,
    MOST_ROWS,
    NOTHING,
    SOFT,
    bars,
    family_of,
    new_figure,
    plain,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def bench_figure(report: BenchReport) -> Figure | None:
    """Return the plot that belongs to *report*; None if nothing was measured."""
    return largest_figure(report) if report.is_search else trade_off_figure(report)


def trade_off_figure(report: BenchReport) -> Figure | None:
    """Return memory versus time: one point for each measured method, best at the lower left."""
    measured = [row for row in report.rows if row.step is not None]
    on_device = [row for row in measured if row.peak_allocated_bytes is not None]
    rows = on_device or [row for row in measured if row.rss_growth_bytes is not None]
    rows = rows[:MOST_ROWS]
    if not rows:
        return None
    figure, axes = new_figure(8.6, 5.4)
    handles: dict[str, Any] = {}
    points, lines = [], []
    for row in rows:
        family = family_of(row.method)
        median_ms, left_ms, right_ms = _times(row)
        memory_gib = _memory_bytes(row) / GIB
        handles[family.label] = _point(axes, row)
        points.append((median_ms, memory_gib, plain(row.method), family.colour))
        lines.append((left_ms, right_ms, memory_gib))
    what = "peak of allocated device memory" if on_device else "growth of host memory (no device)"
    axes.set_xlabel("time of one step, ms: median and quartiles (axes may begin above 0)")
    axes.set_ylabel(f"{what}, GiB")
    axes.set_xlim(*_limits([x for x, *_ in points]))
    axes.set_ylim(*_limits([y for _, y, *_ in points]))
    labels = [family.label for family in FAMILIES if family.label in handles]
    shown = [handles[label] for label in labels]
    axes.legend(shown, labels, frameon=False, labelcolor=INK, fontsize=9)
    _title(axes, report, "Memory versus time: towards the lower left is better")
    place_labels(figure, axes, points, lines)
    return figure


def _times(row: BenchRow) -> tuple[float, float, float]:
    """Return median and quartiles, which lie on both sides of it whatever a report says."""
    assert row.step is not None
    median_ms = float(row.step.median_ms)
    left_ms = min(median_ms, row.step.lower_quartile_ms)
    return median_ms, left_ms, max(median_ms, row.step.upper_quartile_ms)


def _point(axes: Axes, row: BenchRow) -> Any:
    """Draw a method's point and its quartiles; return what a legend shows."""
    family = family_of(row.method)
    median_ms, left_ms, right_ms = _times(row)
    memory_gib = _memory_bytes(row) / GIB
    axes.errorbar(
        median_ms,
        memory_gib,
        xerr=[[median_ms - left_ms], [right_ms - median_ms]],
        color=family.colour,
        elinewidth=1.2,
        capsize=2.5,
        zorder=2,
    )
    return axes.scatter(
        [median_ms],
        [memory_gib],
        s=170 if family is NOTHING else 62,
        marker=family.marker,
        color=family.colour,
        edgecolor=BACK,
        linewidth=0.8,
        zorder=3,
    )


def largest_figure(report: BenchReport) -> Figure | None:
    """Return the largest micro-batch of each method, as bars."""
    rows = [row for row in report.rows if row.num_tried is not None]
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: row.micro_batch)[-MOST_ROWS:][::-1]
    figure, axes = new_figure(8.6, 1.6 + 0.36 * len(rows))
    shown = [(r.method, float(r.micro_batch), family_of(r.method).colour) for r in rows]
    bars(axes, shown, [_bar_text(row) for row in rows])
    axes.set_xlim(0, max(1, max(row.micro_batch for row in rows)) * 1.3)
    axes.set_xlabel("largest micro-batch that fits, sequences")
    _title(axes, report, "Largest micro-batch: longer is better")
    return figure


def _bar_text(row: BenchRow) -> str:
    if row.status != "ok" and (row.step is None or row.tokens_per_s is None):
        return f"{row.micro_batch}   {plain(row.status)}"
    if row.step is None or row.tokens_per_s is None:
        return str(row.micro_batch)
    return f"{row.micro_batch}   {row.tokens_per_s:,.0f} tokens/s"


def _memory_bytes(row: BenchRow) -> int:
    value = row.peak_allocated_bytes
    return value if value is not None else (row.rss_growth_bytes or 0)


def _title(axes: Axes, report: BenchReport, claim: str) -> None:
    axes.set_title(claim, loc="left", fontsize=12, fontweight="bold", color=INK, pad=26)
    axes.text(
        *(0, 1.025, plain(f"{report.title}, on {report.device.get('name')}", 120)),
        transform=axes.transAxes,
        fontsize=9,
        color=SOFT,
    )


def _limits(values: list[float]) -> tuple[float, float]:
    """Return limits around *values*, with room for labels; near points do not fill the plot."""
    low, high = min(values), max(values)
    spread = max(high - low, 0.2 * abs(high)) or 1.0
    middle = (low + high) / 2
    return max(0.0, middle - 0.68 * spread), middle + 0.68 * spread
