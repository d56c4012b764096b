"""The papers' forms of plots: lines over the micro-batch, and bars in groups."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from hf_pyao.tools.report.plots.data import (
    BACKWARD,
    FORWARD,
    NOTHING,
    OFFLOAD,
    OURS,
    QUIET,
    RECOMPUTE,
    RELOAD,
    WAITING,
)
from hf_pyao.tools.report.plots.look import INK, new_figure, plain, style

_COLOURS = (NOTHING, OURS, FORWARD, RECOMPUTE, BACKWARD, RELOAD, QUIET, WAITING, OFFLOAD)
_MARKERS = "*osv^DPX<"
_HATCHES = ("", "//", "", "..", "", "xx", "", "\\\\", "")

Line = tuple[str, str, float, float]
"""Panel, name, x, y."""


def lines(points: Sequence[Line], x_label: str, y_label: str, *, marks: Sequence[Line] = ()) -> Any:
    """Draw a panel for each model: y over x, a line for each name; *marks* are crossed out."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(point[0] for point in points))
    names = list(dict.fromkeys(point[1] for point in points))
    figure = Figure(figsize=(3.6 * len(panels) + 1, 3.8), layout="constrained", facecolor="white")
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        style(axes)
        for number, name in enumerate(names):
            found = sorted((p[2], p[3]) for p in points if p[:2] == (panel, name))
            if found:
                axes.plot(
                    *zip(*found, strict=True),
                    color=_COLOURS[number % len(_COLOURS)].colour,
                    marker=_MARKERS[number % len(_MARKERS)],
                    markersize=5,
                    linewidth=1.3,
                    label=plain(name),
                )
        crossed = [(p[2], p[3]) for p in marks if p[0] == panel]
        if crossed:
            axes.plot(*zip(*crossed, strict=True), "x", color="#c0392b", markersize=10, mew=1.6)
        axes.set_title(panel, fontsize=10, color=INK)
        axes.set_xlabel(x_label)
        axes.set_ylim(bottom=0)
    figure.axes[0].set_ylabel(y_label)
    _legend(figure)
    return figure


def over_micro_batch(
    rows: Sequence[dict[str, Any]], y_label: str, *, crossed: Sequence[dict[str, Any]] = ()
) -> Any:
    """Draw the rows' values over their micro-batch, a panel for each model; cross some out."""
    points, marks = (
        [(row["model"], row["system"], row["micro_batch"], row["value"]) for row in each]
        for each in (rows, crossed)
    )
    return lines(points, "micro-batch", y_label, marks=marks)


def grouped_bars(bars: Sequence[tuple[str, str, float]], y_label: str) -> Any:
    """Draw bars: group, name, height."""
    groups = list(dict.fromkeys(bar[0] for bar in bars))
    names = list(dict.fromkeys(bar[1] for bar in bars))
    figure, axes = new_figure(8.5, 3.8)
    width = 0.84 / max(1, len(names))
    for number, name in enumerate(names):
        heights = {bar[0]: bar[2] for bar in bars if bar[1] == name}
        at = [groups.index(group) + (number - (len(names) - 1) / 2) * width for group in heights]
        axes.bar(
            at,
            list(heights.values()),
            width * 0.92,
            color=_COLOURS[number % len(_COLOURS)].colour,
            hatch=_HATCHES[number % len(_HATCHES)],
            edgecolor="white",
            label=plain(name),
        )
    longest = max(14, 84 // max(1, len(groups)))
    axes.set_xticks(
        range(len(groups)),
        [textwrap.fill(group, longest, break_long_words=False) for group in groups],
    )
    axes.grid(visible=False, axis="x")
    axes.set_ylabel(y_label)
    _legend(figure)
    return figure


def _legend(figure: Any) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    legend = figure.legend(
        handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False
    )
    for text in legend.get_texts():
        text.set_color(INK)
