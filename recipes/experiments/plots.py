"""The papers' forms of plots: lines in a panel for each model, and bars in groups."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, kw_only=True)
class Plot:
    """What is drawn of the rows of a result file. Each text is a format with a row's keys."""

    y_label: str
    x_label: str | None = None
    """Of lines; None: bars in groups."""
    series: Sequence[tuple[str, ...]] = (("{model}", "{system}", "{micro_batch}", "{value}"),)
    """What each row adds: panel, name, x and y of a line's point; or group, name and height of a
    bar. What has no number in some row is left out there."""
    where: Mapping[str, str] = field(default_factory=dict)
    """Format -> what it has to come to; all rows if none does."""
    has_log_x: bool = False

    def draw(self, document: dict[str, Any]) -> Any:
        """Return the figure; points of rows whose status is not ok are crossed out."""
        found = [
            row
            for row in document["rows"]
            if all(key.format(**row) == wanted for key, wanted in self.where.items())
        ]
        points, crossed = [], []
        for row in found or document["rows"]:
            for names in self.series:
                *texts, y = (name.format(**row) for name in names)
                if y != "None":
                    points.append((*texts, y))
                    crossed += [points[-1]] * (row["status"] != "ok")
        y_label = self.y_label.format(**document["rows"][0])
        if self.x_label is None:
            return grouped_bars([(group, name, float(y)) for group, name, y in points], y_label)
        figure = lines(_numbers(points), self.x_label, y_label, marks=_numbers(crossed))
        for axes in figure.axes:
            axes.set_xscale("log" if self.has_log_x else "linear")
        return figure


def loss_curves(document: dict[str, Any]) -> Any:
    """Draw the loss over the steps of each run, a panel for each dtype of the weights."""
    points = []
    for row in document["rows"]:
        if "curve" in row["detail"]:
            run, panel = re.split(r", (?=b?float)", row["system"], maxsplit=1)
            points += [
                (panel, run, float(step), float(loss)) for step, loss in row["detail"]["curve"]
            ]
    return lines(points, "step", "loss")


def _numbers(points: Sequence[tuple[str, ...]]) -> list[Line]:
    return [(panel, name, float(x.split()[-1]), float(y)) for panel, name, x, y in points]


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
        rotation=20 if len(groups) > 8 else 0,
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
