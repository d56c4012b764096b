"""The plot of a step: memory on the device over time, above what runs, on one axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_pyao.plan.documents.step import StepReport, StepSpan
from hf_pyao.tools.report.plots.look import (
    BACK,
    BACKWARD,
    FORWARD,
    INK,
    NOTHING,
    OFFLOAD,
    OURS,
    QUIET,
    RECOMPUTE,
    RELOAD,
    WAITING,
    Family,
    plain,
    style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROWS = (
    ("compute", ("forward", "backward", "outside")),
    ("waiting", ("stall",)),
    ("offload", ("offload",)),
    ("reload", ("reload",)),
    ("overhead", ("overhead",)),
)
"""Rows of the time line, from the top, and the lanes in each."""

_FAMILIES: dict[str, Family] = {
    "forward": FORWARD,
    "backward": BACKWARD,
    "outside": QUIET,
    "stall": WAITING,
    "offload": OURS,
    "reload": RELOAD,
    "overhead": RECOMPUTE,
}

_LEGEND = (("forward", "forward"), ("backward", "backward"), ("outside", "outside of layers"))

FINEST = 1500
"""Spans that are shorter than this part of the step are drawn as one with what follows."""

_FAR_LIMIT = 2.5
"""A limit so many times above the peak is said, and not drawn: the curve would lie flat."""


def step_figure(report: StepReport) -> Figure | None:
    """Return the plot of a step; None if it has neither memory nor spans."""
    from matplotlib.figure import Figure

    rows = [row for row in _ROWS if any(span.lane in row[1] for span in report.spans)]
    if not rows and not report.memory:
        return None
    heights = [3.2] * bool(report.memory) + [0.7 + 0.36 * len(rows)] * bool(rows)
    figure = Figure(figsize=(11.0, sum(heights) + 0.8), layout="constrained", facecolor=BACK)
    all_axes = figure.subplots(
        len(heights), 1, sharex=True, height_ratios=heights, squeeze=False
    ).flat
    pending = list(all_axes)
    for axes in pending:
        style(axes)
    pending[-1].set_xlabel("time since the step began, ms")
    pending[-1].set_xlim(0, max(float(report.end_ms), 1e-9))
    if report.memory:
        _draw_memory(pending.pop(0), report)
    if rows:
        _draw_spans(pending.pop(0), report, rows)
        _legend(figure, report)
    return figure


def _draw_memory(axes: Axes, report: StepReport) -> None:
    peak_bytes = max(float(point.nbytes) for point in report.memory)
    scale, unit = next(
        ((scale, unit) for scale, unit in ((1e9, "GB"), (1e6, "MB")) if peak_bytes >= scale),
        (1.0, "bytes"),
    )
    times_ms = [float(point.time_ms) for point in report.memory]
    sizes = [point.nbytes / scale for point in report.memory]
    colour = OFFLOAD.colour
    axes.fill_between(times_ms, sizes, step="post", color=colour, alpha=0.22, linewidth=0)
    axes.plot(times_ms, sizes, drawstyle="steps-post", color=colour, linewidth=1.1)
    top = peak_bytes / scale
    limit = report.limit_bytes
    if limit is not None and limit <= _FAR_LIMIT * peak_bytes:
        top = max(top, limit / scale)
        axes.axhline(limit / scale, color=WAITING.colour, linestyle="--", linewidth=1.1)
        _say_beside(axes, 0.0, limit / scale, f"limit {limit / scale:,.4g} {unit}", WAITING)
    axes.set_ylim(0, max(top, 1e-9) * 1.16)
    axes.set_ylabel(f"memory on the device, {unit}")
    if report.peak is not None:
        _mark_peak(axes, report, scale, unit)


def _mark_peak(axes: Axes, report: StepReport, scale: float, unit: str) -> None:
    peak = report.peak
    assert peak is not None
    x, y = float(peak.time_ms), peak.nbytes / scale
    axes.plot([x], [y], marker="o", color=NOTHING.colour, markersize=5, clip_on=False)
    _say_beside(axes, x, y, f"peak {y:,.4g} {unit}", NOTHING)
    said = f"peak in {plain(peak.place)}, set by {plain(peak.tensor)}"
    axes.set_title(said, loc="left", fontsize=9, color=INK)


def _say_beside(axes: Axes, x: float, y: float, text: str, family: Family) -> None:
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
        color=family.colour,
    )


def _draw_spans(
    axes: Axes, report: StepReport, rows: Sequence[tuple[str, tuple[str, ...]]]
) -> None:
    finest_ms = float(report.end_ms) / FINEST
    for number, (_, lanes) in enumerate(rows):
        for lane in lanes:
            spans = sorted(
                (span for span in report.spans if span.lane == lane), key=lambda s: s.start_ms
            )
            for shade, bars in enumerate(_two_shades(spans, finest_ms)):
                axes.broken_barh(
                    bars,
                    (number - 0.36, 0.72),
                    color=_FAMILIES[lane].colour,
                    alpha=(1.0, 0.62)[shade],
                    linewidth=0,
                )
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")


def _two_shades(
    spans: Sequence[StepSpan], finest_ms: float
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return starts and widths in two lists, so that neighbours with other labels are told apart.

    What is shorter than *finest_ms* is one with what follows: no screen shows it.
    """
    shades: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    shade, label = 0, None
    start_ms = end_ms = -1.0
    for span in spans:
        is_near = span.start_ms - end_ms < finest_ms and end_ms - start_ms < finest_ms
        if start_ms >= 0 and is_near:
            end_ms = max(end_ms, float(span.end_ms))
            continue
        if start_ms >= 0:
            shades[shade].append((start_ms, end_ms - start_ms))
        shade = shade if span.label == label else 1 - shade
        start_ms, end_ms, label = float(span.start_ms), float(span.end_ms), span.label
    if start_ms >= 0:
        shades[shade].append((start_ms, end_ms - start_ms))
    return shades


def _legend(figure: Figure, report: StepReport) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=_FAMILIES[lane].colour, label=label)
        for lane, label in _LEGEND
        if any(span.lane == lane for span in report.spans)
    ]
    if handles:
        figure.legend(
            handles=handles,
            loc="outside lower right",
            ncols=len(handles),
            frameon=False,
            labelcolor=INK,
            fontsize=8.5,
        )
