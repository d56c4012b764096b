"""The plot of a choice of micro-batch: time for each sample and peak over the size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_pyao.plan.documents.microbatch import SEQUENCE, MicroBatchReport, MicroBatchRow
from hf_pyao.quantities import GIB
from hf_pyao.tools.report.plots.look import LIGHT, MOST_ROWS, OURS, QUIET, WAITING, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def microbatch_figure(report: MicroBatchReport, look: Look = LIGHT) -> Figure | None:
    """Return time a sample, and the peak with its limit, over the size; None without rows."""
    rows = report.rows[:MOST_ROWS]
    if not rows:
        return None
    is_length = report.find == SEQUENCE
    figure, (left, right) = look.two_axes(9.6, 3.4, (1, 1))
    fitting = [row for row in rows if row.fits]
    _line(left, look, [(_size(r, is_length), r.sample_ms or 0.0) for r in fitting])
    left.set_ylabel(look.wrapped("ms for each sample (predicted)"))
    _line(right, look, [(_size(r, is_length), r.peak_bytes / GIB) for r in fitting])
    too_large = [(_size(r, is_length), r.peak_bytes / GIB) for r in rows if not r.fits]
    right.plot(
        [size for size, _ in too_large],
        [peak for _, peak in too_large],
        linestyle="none",
        marker="x",
        color=look.colour(QUIET),
        label="lowest peak of those that do not fit",
    )
    limit_gib = report.limit_bytes / GIB
    right.axhline(
        limit_gib, color=look.colour(WAITING), linestyle="--", linewidth=1.2, label="limit"
    )
    right.set_ylabel(look.wrapped("peak on the device, GiB (predicted)"))
    for axes in (left, right):
        _sizes(axes, [_size(row, is_length) for row in rows])
        axes.set_xlabel("tokens of a sample" if is_length else "micro-batch, samples")
        if report.chosen is not None:
            chosen = _size(report.chosen, is_length)
            axes.axvline(chosen, color=look.soft, linewidth=0.9, linestyle=":", label="chosen")
    for axes, room in ((left, 1.3), (right, 1.1)):
        axes.set_ylim(0, room * axes.get_ylim()[1])
    lines, labels = right.get_legend_handles_labels()
    left.legend(lines, labels, fontsize=8, frameon=False, labelcolor=look.ink, loc="best")
    if not look.is_narrow:
        figure.suptitle(look.plain(report.title), color=look.ink, fontsize=11)
    return figure


def _size(row: MicroBatchRow, is_length: bool) -> int:
    return row.sequence_length if is_length else row.micro_batch


def _line(axes: Axes, look: Look, points: list[tuple[int, float]]) -> None:
    axes.plot(
        [size for size, _ in points],
        [value for _, value in points],
        color=look.colour(OURS),
        marker=OURS.marker,
        label="best plan that fits",
    )


def _sizes(axes: Axes, sizes: list[int]) -> None:
    """Space sizes by their ratio, and name some of them."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xlim(min(sizes) / 1.2, max(sizes) * 1.2)
    every = -(-len(sizes) // 8)
    shown = sizes[::every]
    axes.set_xticks(shown, [f"{size:,}" for size in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    if len(shown) > 5:
        axes.tick_params(axis="x", labelrotation=45)
