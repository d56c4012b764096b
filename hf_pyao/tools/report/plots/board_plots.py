"""The plot of the board: memory of a step versus its time; on a narrow page, memory as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_pyao.plan.documents.bench import OK
from hf_pyao.plan.documents.board import BoardReport, BoardRow
from hf_pyao.tools.report.plots.labels import place_labels
from hf_pyao.tools.report.plots.look import FAMILIES, LIGHT, MOST_ROWS, NOTHING, Look, family_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20


def board_figure(report: BoardReport, look: Look = LIGHT) -> Figure | None:
    """Return one point for each measured method, with its spread; None if none has both figures.

    A narrow page has no room for the names beside the points: it gets a bar for each method.
    """
    rows = [row for row in report.rows if row.status == OK][:MOST_ROWS]
    if look.is_narrow:
        return _bars(rows, look)
    found = [(row.method, row.step_ms, row.step_peak_bytes) for row in rows]
    figure, axes = look.figure(8.6, 5.8)
    handles: dict[str, Any] = {}
    points, bars = [], []
    for method, time, memory in found:
        if time is None or memory is None:
            continue
        family = family_of(method)
        colour = look.colour(family)
        height = memory.mean / MIB
        axes.errorbar(
            time.mean,
            height,
            xerr=[[time.mean - time.least], [time.most - time.mean]],
            yerr=[[(memory.mean - memory.least) / MIB], [(memory.most - memory.mean) / MIB]],
            color=colour,
            elinewidth=1.2,
            capsize=2.5,
            zorder=2,
        )
        handles[family.label] = axes.scatter(
            [time.mean],
            [height],
            s=170 if family is NOTHING else 62,
            marker=family.marker,
            color=colour,
            edgecolor=look.back,
            linewidth=0.8,
            zorder=3,
        )
        points.append((time.mean, height, look.plain(method), colour))
        bars.append((time.least, time.most, height))
    if not points:
        return None
    axes.set_xlabel("time of one step, ms: mean, least and most of the rounds")
    axes.set_ylabel("memory of a step, MiB")
    axes.set_xlim(0, 1.15 * max(x for x, *_ in points))
    axes.set_ylim(0, 1.12 * max(y for _, y, *_ in points))
    labels = [family.label for family in FAMILIES if family.label in handles]
    axes.legend(
        [handles[label] for label in labels],
        labels,
        frameon=False,
        labelcolor=look.ink,
        fontsize=9,
    )
    claim = "Memory versus time of a step: towards the lower left is better"
    size = 9 if look.is_narrow else 12
    axes.set_title(look.wrapped(claim), loc="left", fontsize=size, color=look.ink)
    place_labels(figure, axes, points, bars)
    return figure


def _bars(rows: Sequence[BoardRow], look: Look) -> Figure | None:
    """Return a bar of memory for each method, with its time at the end; None without any."""
    found = [(row.method, row.step_peak_bytes, row.step_ms) for row in rows]
    measured = sorted(
        ((method, memory, time) for method, memory, time in found if memory and time),
        key=lambda row: row[1].mean,
    )
    if not measured:
        return None
    inches = look.bar_inches([method for method, _, _ in measured], 0.46)
    figure, axes = look.figure(4.0, 1.2 + inches * len(measured))
    bars = [
        (method, memory.mean / MIB, look.colour(family_of(method)))
        for method, memory, _ in measured
    ]
    texts = [f"{memory.mean / MIB:,.0f}, {time.mean:,.0f} ms" for _, memory, time in measured]
    look.bars(axes, bars, texts)
    axes.set_xlim(0, 1.9 * max(size for _, size, _ in bars))
    axes.set_xlabel(look.wrapped("memory of a step, MiB, and time of a step", 26))
    return figure
