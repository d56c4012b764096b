"""Draws plots that are given as data (``data.py``), several in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_pyao.tools.report.plots.data import (
    OFFLOAD,
    WAITING,
    Bars,
    Columns,
    Front,
    Lanes,
    Plot,
    Timeline,
)
from hf_pyao.tools.report.plots.look import BACK, INK, SOFT, plain, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "os^vD<>PX*"

FINEST = 1500
"""Spans that are shorter than this part of the time are drawn as one with what follows."""


def drawn(rows: Sequence[Sequence[Plot]], title: str = "") -> Figure:
    """Return one figure: rows of plots beside each other, and one legend below them all."""
    from matplotlib.figure import Figure

    heights = [max(map(_height, row)) for row in rows]
    width = 11.0 if len(rows) > 1 or len(rows[0]) > 1 else 8.6
    figure = Figure(figsize=(width, sum(heights) + 0.6), layout="constrained", facecolor=BACK)
    num_columns = max(map(len, rows))
    grid = figure.add_gridspec(len(rows), num_columns, height_ratios=heights)
    for number, row in enumerate(rows):
        for column, plot in enumerate(row):
            place = grid[number, column] if len(row) > 1 else grid[number, :]
            _draw(figure.add_subplot(place), plot)
    if title:
        figure.suptitle(plain(title, 110), color=INK, fontsize=11)
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",  # inside, it would cover something
            ncols=min(4, len(handles)),
            frameon=False,
            labelcolor=INK,
            fontsize=8.5,
        )
    return figure


def _height(plot: Plot) -> float:
    """Return a plot's height in inches."""
    if isinstance(plot, Bars):
        return 1.3 + 0.34 * len(plot.bars)
    if isinstance(plot, Lanes):
        return 0.7 + 0.36 * len(plot.rows)
    return 4.6 if isinstance(plot, Front) else 3.0


def _draw(axes: Axes, plot: Plot) -> None:
    style(axes)
    axes.set_title(plain(plot.title, 110), loc="left", fontsize=10, color=INK)
    if isinstance(plot, Bars):
        _draw_bars(axes, plot)
    elif isinstance(plot, Front):
        _draw_front(axes, plot)
    elif isinstance(plot, Columns):
        _draw_columns(axes, plot)
    elif isinstance(plot, Timeline):
        _draw_timeline(axes, plot)
    else:
        _draw_lanes(axes, plot)


def _draw_bars(axes: Axes, plot: Bars) -> None:
    bars = plot.bars[::-1]  # barh draws from the bottom
    values = [float(bar.value) for bar in bars]
    colours = [bar.family.colour for bar in bars]
    drawn = axes.barh(range(len(bars)), values, color=colours, height=0.66)
    axes.set_yticks(range(len(bars)), [plain(bar.label) for bar in bars])
    behind = {"facecolor": BACK, "edgecolor": "none", "pad": 0.8}
    texts = [plain(bar.text) for bar in bars]
    axes.bar_label(drawn, texts, padding=4, color=INK, fontsize=9, bbox=behind)
    axes.set_xlim(0, max(1e-9, *values) * 1.3)
    axes.set_xlabel(plot.x_label)
    axes.grid(visible=False, axis="y")


def _draw_front(axes: Axes, plot: Front) -> None:
    for number, line in enumerate(plot.lines):
        axes.errorbar(
            line.x,
            line.y,
            xerr=line.x_errors,
            yerr=line.y_errors,
            color=line.family.colour,
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=6,
            linewidth=1.2,
            capsize=2.5,
            label=plain(line.name, 48) or None,
        )
    for x, y, text in plot.names:
        place: dict[str, Any] = {"xytext": (6, 6), "textcoords": "offset points", "fontsize": 8.5}
        axes.annotate(plain(text), (x, y), color=INK, **place)
    if plot.marked is not None:
        x, y, label = plot.marked
        ring: dict[str, Any] = {
            "facecolors": "none",
            "edgecolors": INK,
            "linewidths": 1.6,
            "zorder": 4,
        }
        axes.scatter([x], [y], s=150, label=label, **ring)
    if plot.x_limit is not None:
        axes.axvline(plot.x_limit, color=SOFT, linestyle="--", linewidth=1.0, label="limit")
    axes.margins(x=0.12, y=0.15)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)


def _draw_columns(axes: Axes, plot: Columns) -> None:
    from matplotlib.ticker import MaxNLocator

    num_columns = max(len(values) for *_, values in plot.parts)
    bottom = [0.0] * num_columns
    for label, family, values in plot.parts:
        colour = family.colour
        axes.bar(range(num_columns), values, 0.86, bottom=bottom, color=colour, label=label)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    axes.set_xlim(-0.6, num_columns - 0.4)
    axes.set_ylim(0, max(1e-9, *bottom) * 1.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False, axis="x")
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)


def _draw_timeline(axes: Axes, plot: Timeline) -> None:
    colour, top = OFFLOAD.colour, max(plot.sizes)
    times_ms = plot.times_ms
    axes.fill_between(times_ms, plot.sizes, step="post", color=colour, alpha=0.22, linewidth=0)
    axes.plot(times_ms, plot.sizes, drawstyle="steps-post", color=colour, linewidth=1.1)
    axes.set_xlim(0, max(plot.end_ms, 1e-9))
    if plot.limit is not None:
        limit, said = plot.limit
        top = max(top, limit)
        axes.axhline(limit, color=WAITING.colour, linestyle="--", linewidth=1.1)
        _say_beside(axes, 0.0, limit, said)
    axes.set_ylim(0, max(top, 1e-9) * 1.16)
    axes.set_ylabel(plot.y_label)
    if plot.peak is not None:
        time_ms, size, said = plot.peak
        axes.plot([time_ms], [size], marker="o", color=INK, markersize=5, clip_on=False)
        _say_beside(axes, time_ms, size, said)


def _say_beside(axes: Axes, x: float, y: float, text: str) -> None:
    """Write *text* above a point, towards the middle of the plot."""
    is_right = x > axes.get_xlim()[1] / 2
    axes.annotate(
        text,
        (x, y),
        xytext=(-4 if is_right else 4, 5),
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="bottom",
        fontsize=9,
        color=INK,
    )


def _draw_lanes(axes: Axes, plot: Lanes) -> None:
    finest_ms = plot.end_ms / FINEST
    for number, (_, lanes) in enumerate(plot.rows):
        for lane in lanes:
            for shade, bars in enumerate(_two_shades(lane.spans, finest_ms)):
                axes.broken_barh(
                    bars,
                    (number - 0.36, 0.72),
                    color=lane.family.colour,
                    alpha=(1.0, 0.62)[shade],
                    linewidth=0,
                    label=None if shade or len(lanes) == 1 else lane.family.label,
                )
    axes.set_yticks(range(len(plot.rows)), [name for name, _ in plot.rows])
    axes.set_ylim(len(plot.rows) - 0.45, -0.55)
    axes.set_xlim(0, max(plot.end_ms, 1e-9))
    axes.set_xlabel("time since the step began, ms")
    axes.grid(visible=False, axis="y")


def _two_shades(
    spans: Sequence[tuple[str, float, float]], finest_ms: float
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return starts and widths in two lists, so that neighbours with other labels are told apart.

    What is shorter than *finest_ms* is one with what follows: no screen shows it.
    """
    joined: list[tuple[str, float, float]] = []
    for label, start_ms, end_ms in spans:
        if joined:
            first, begun_ms, last_ms = joined[-1]
            if start_ms - last_ms < finest_ms and last_ms - begun_ms < finest_ms:
                joined[-1] = first, begun_ms, max(last_ms, end_ms)
                continue
        joined.append((label, start_ms, end_ms))
    shades: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    shade, before = 0, None
    for label, start_ms, end_ms in joined:
        shade = shade if label == before else 1 - shade
        shades[shade].append((start_ms, end_ms - start_ms))
        before = label
    return shades
