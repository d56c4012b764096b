"""Plots of reports, by matplotlib's object interface: no global state, no window.

Colours and markers tell families of methods apart, so that a plot reads in grey too.
"""

from __future__ import annotations

import io
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_pyao.report.bench_report import REFERENCE, BenchReport, BenchRow
from hf_pyao.report.estimate_report import EstimateReport
from hf_pyao.report.labels import place_labels
from hf_pyao.report.profile_report import Profile
from hf_pyao.report.run_report import RunReport
from hf_pyao.report.schema import ReportError
from hf_pyao.report.tables import GIB, MIB, RUN_FIGURES, kept_rows, number
from hf_pyao.text import describe_error, one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PNG_DPI = 160
MOST_ROWS = 100
"""Most rows of a benchmark that a plot shows: an image has a largest size."""
_INK = "#1f2933"
_SOFT = "#7b8794"
_GRID = "#e4e7eb"


@dataclass(frozen=True)
class Family:
    """Methods that work alike, and how a plot shows them."""

    label: str
    colour: str
    marker: str


NOTHING = Family("nothing", "#1f2933", "*")
OURS = Family("hf_pyao", "#0b7a75", "o")
RECOMPUTE = Family("recompute", "#d9822b", "^")
OFFLOAD = Family("other offloading", "#5b62b3", "s")
FAMILIES = (NOTHING, OURS, RECOMPUTE, OFFLOAD)


def family_of(method: str) -> Family:
    """Return the family of a method, by its name."""
    if method == REFERENCE:
        return NOTHING
    if method.startswith("pyao"):
        return OURS
    return RECOMPUTE if method.startswith(("checkpoint", "deepspeed")) else OFFLOAD


def need_matplotlib() -> None:
    """Check that plots can be drawn.

    Raises:
        ReportError: matplotlib is missing; says how to get it and how to do without.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise ReportError(
            "plots need matplotlib, which is not installed: pip install 'hf_pyao[report]'. With "
            "--no-plots the tables are written without them."
        ) from error
    except Exception as error:  # installed, but broken
        raise ReportError(
            f"plots need matplotlib, which cannot be imported ({describe_error(error)}): install "
            "it anew. With --no-plots the tables are written without them."
        ) from error


def figure_of(report: BenchReport | RunReport | EstimateReport | Profile) -> Figure | None:
    """Return the plot that belongs to *report*; None if it has too few figures for one.

    Raises:
        ReportError: matplotlib is missing.
    """
    need_matplotlib()
    if isinstance(report, RunReport):
        return run_figure(report)
    if isinstance(report, EstimateReport):
        return estimate_figure(report)
    if isinstance(report, Profile):
        return throughput_figure(report)
    return largest_figure(report) if report.is_search else trade_off_figure(report)


def image_bytes(figure: Figure, kind: str) -> bytes:
    """Return *figure* as a file of *kind*: ``png`` or ``svg``."""
    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else None  # the same report, the same bytes
    figure.savefig(buffer, format=kind, dpi=PNG_DPI, metadata=metadata)
    return buffer.getvalue()


def trade_off_figure(report: BenchReport) -> Figure | None:
    """Return memory versus time: one point for each measured method, best at the lower left."""
    measured = [row for row in report.rows if row.step is not None]
    on_device = [row for row in measured if row.peak_allocated_bytes is not None]
    rows = on_device or [row for row in measured if row.rss_growth_bytes is not None]
    rows = rows[:MOST_ROWS]
    if not rows:
        return None
    figure, axes = _figure(8.6, 5.4)
    handles: dict[str, Any] = {}
    points, bars = [], []
    for row in rows:
        family, step = family_of(row.method), row.step
        assert step is not None
        memory_gib = _memory_bytes(row) / GIB
        median_ms = float(step.median_ms)
        below = max(0.0, median_ms - step.lower_quartile_ms)
        above = max(0.0, step.upper_quartile_ms - median_ms)
        axes.errorbar(
            median_ms,
            memory_gib,
            xerr=[[below], [above]],
            color=family.colour,
            elinewidth=1.2,
            capsize=2.5,
            zorder=2,
        )
        handles[family.label] = axes.scatter(
            [median_ms],
            [memory_gib],
            s=170 if family is NOTHING else 62,
            marker=family.marker,
            color=family.colour,
            edgecolor="white",
            linewidth=0.8,
            zorder=3,
        )
        points.append((median_ms, memory_gib, _plain(row.method), family.colour))
        bars.append((median_ms - below, median_ms + above, memory_gib))
    what = "peak of allocated device memory" if on_device else "growth of host memory (no device)"
    axes.set_xlabel("time of one step, ms: median and quartiles (axes may begin above 0)")
    axes.set_ylabel(f"{what}, GiB")
    axes.set_xlim(*_limits([x for x, *_ in points]))
    axes.set_ylim(*_limits([y for _, y, *_ in points]))
    labels = [family.label for family in FAMILIES if family.label in handles]
    shown = [handles[label] for label in labels]
    axes.legend(shown, labels, frameon=False, labelcolor=_INK, fontsize=9)
    _title(axes, report, "Memory versus time: towards the lower left is better")
    place_labels(figure, axes, points, bars)
    return figure


def largest_figure(report: BenchReport) -> Figure | None:
    """Return the largest micro-batch of each method, as bars."""
    rows = [row for row in report.rows if row.num_tried is not None]
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: row.micro_batch)[-MOST_ROWS:]
    figure, axes = _figure(8.6, 1.6 + 0.36 * len(rows))
    colours = [family_of(row.method).colour for row in rows]
    bars = axes.barh(
        range(len(rows)), [float(row.micro_batch) for row in rows], color=colours, height=0.66
    )
    axes.set_yticks(range(len(rows)), [_plain(row.method) for row in rows])
    axes.bar_label(bars, [_bar_text(row) for row in rows], padding=4, color=_INK, fontsize=9)
    axes.set_xlim(0, max(1, max(row.micro_batch for row in rows)) * 1.3)
    axes.set_xlabel("largest micro-batch that fits, sequences")
    axes.grid(visible=False, axis="y")
    _title(axes, report, "Largest micro-batch: longer is better")
    return figure


def throughput_figure(profile: Profile) -> Figure | None:
    """Return the activation throughput of each part of a layer (PyAO paper, Figure 2), as bars.

    Lines are the link's speed and the bound above which throughputs are outliers.
    """
    rows = [row for row in profile.modules if row.throughput_gib_per_s is not None][:MOST_ROWS]
    rows.sort(key=lambda row: row.throughput_gib_per_s or 0.0)
    if not rows:
        return None
    values = [row.throughput_gib_per_s or 0.0 for row in rows]
    figure, axes = _figure(8.6, 1.8 + 0.34 * len(rows))
    bars = axes.barh(range(len(rows)), values, color=OURS.colour, height=0.66)
    axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=4, color=_INK, fontsize=9)
    axes.set_yticks(range(len(rows)), [_plain(row.path or "(the layer itself)") for row in rows])
    lines = [("the link's speed", profile.link_gib_per_s, RECOMPUTE.colour, "--")]
    if len(values) > 1:
        lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
        lines.append(("Q3 + 1.5 IQR", upper + 1.5 * (upper - lower), OFFLOAD.colour, ":"))
    for label, value, colour, style in lines:
        if value is not None:
            axes.axvline(value, color=colour, linestyle=style, label=f"{label}, {value:.3g}")
    axes.set_xlim(0, max([*values, *(value or 0.0 for _, value, _, _ in lines), 1e-9]) * 1.18)
    axes.set_xlabel("activation throughput, GiB/s: bytes over the time between saved tensors")
    axes.grid(visible=False, axis="y")
    axes.legend(loc="lower right", facecolor="white", edgecolor="none", fontsize=9)
    axes.set_title(_plain(profile.title), color=_INK, fontsize=11, loc="left")
    return figure


def estimate_figure(report: EstimateReport) -> Figure | None:
    """Return each way's largest micro-batch and its speed there, as bars."""
    rows = report.rows[:MOST_ROWS][::-1]
    if not rows:
        return None
    figure, (left, right) = _two_axes(9.6, 1.8 + 0.34 * len(rows))
    colours = [_family_of_way(row.method).colour for row in rows]
    for axes, values, label in (
        (
            left,
            [float(row.largest_micro_batch) for row in rows],
            "largest micro-batch, samples (estimated)",
        ),
        (right, [row.tokens_per_s for row in rows], "tokens/s there (estimated)"),
    ):
        bars = axes.barh(range(len(rows)), values, color=colours, height=0.66)
        texts = [f"{value:,.0f}" for value in values]
        axes.bar_label(bars, texts, padding=4, color=_INK, fontsize=9)
        axes.set_xlim(0, max(1.0, *values) * 1.3)
        axes.set_xlabel(label)
        axes.grid(visible=False, axis="y")
    left.set_yticks(range(len(rows)), [_plain(row.method) for row in rows])
    right.set_yticks(range(len(rows)), [""] * len(rows))
    figure.suptitle(_plain(report.title), color=_INK, fontsize=11)
    return figure


def _family_of_way(method: str) -> Family:
    if method.startswith("policy"):
        return OURS
    return RECOMPUTE if method.startswith("checkpointing") else NOTHING


def run_figure(report: RunReport) -> Figure | None:
    """Return where a micro-batch's bytes were, and what its copies cost."""
    if not report.totals.get("num_micro_batches"):
        return None
    num_micro_batches = max(1, report.totals["num_micro_batches"])
    labels = dict(RUN_FIGURES)

    def mean(key: str) -> float:
        return float(report.totals.get(key, 0)) / num_micro_batches

    sizes = [
        (labels[key], mean(key), colour)
        for key, colour in (
            ("would_hold_bytes", NOTHING.colour),
            ("held_bytes", RECOMPUTE.colour),
            ("offloaded_bytes", OURS.colour),
            ("recomputed_bytes", OFFLOAD.colour),
        )
        if key != "recomputed_bytes" or mean(key)
    ]
    sizes += [
        (f"kept: {reason}", float(report.totals[f"kept_bytes/{reason}"]) / num_micro_batches, _SOFT)
        for reason, _ in kept_rows(report)[:5]
    ]
    times = [
        (labels[key], mean(key), colour)
        for key, colour in (
            ("transfer_ms", OURS.colour),
            ("stall_forward_ms", RECOMPUTE.colour),
            ("stall_backward_ms", RECOMPUTE.colour),
        )
    ]
    figure, (left, right) = _two_axes(11.0, 1.9 + 0.34 * len(sizes))
    scale, unit = (GIB, "GiB") if max(size for _, size, _ in sizes) >= GIB else (MIB, "MiB")
    _bars(left, [(label, size / scale, colour) for label, size, colour in sizes])
    left.set_xlabel(f"{unit} per micro-batch, mean over the run")
    left.set_title("saved for backward", loc="left", fontsize=10, color=_INK)
    _bars(right, times)
    right.set_xlabel("ms per micro-batch, mean over the run")
    right.set_title("copies, and compute waiting for them", loc="left", fontsize=10, color=_INK)
    return figure


def _bars(axes: Axes, rows: list[tuple[str, float, str]]) -> None:
    rows = rows[::-1]  # barh draws from the bottom
    bars = axes.barh(range(len(rows)), [r[1] for r in rows], color=[r[2] for r in rows])
    axes.set_yticks(range(len(rows)), [_plain(r[0]) for r in rows])
    axes.bar_label(bars, [number(r[1]) for r in rows], padding=4, color=_INK, fontsize=9)
    axes.set_xlim(0, max(1e-9, max(r[1] for r in rows)) * 1.22)
    axes.grid(visible=False, axis="y")


def _plain(text: str, longest: int = 60) -> str:
    """Return *text* as a label shows it: in one line, cut, and with no formula in it."""
    text = one_line(text)
    text = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return text.replace("$", r"\$")


def _bar_text(row: BenchRow) -> str:
    if row.step is None or row.tokens_per_s is None:
        return (
            f"{row.micro_batch}   {_plain(row.status)}"
            if row.status != "ok"
            else str(row.micro_batch)
        )
    return f"{row.micro_batch}   {row.tokens_per_s:,.0f} tokens/s"


def _memory_bytes(row: BenchRow) -> int:
    value = row.peak_allocated_bytes
    return value if value is not None else (row.rss_growth_bytes or 0)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    _style(axes)
    return figure, axes


def _two_axes(width: float, height: float) -> tuple[Figure, tuple[Axes, Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    for axes in (left, right):
        _style(axes)
    return figure, (left, right)


def _style(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(_GRID)
    axes.tick_params(colors=_INK, length=0, labelsize=9)
    axes.grid(visible=True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.label.set(color=_INK, fontsize=9.5)
    axes.yaxis.label.set(color=_INK, fontsize=9.5)


def _title(axes: Axes, report: BenchReport, claim: str) -> None:
    axes.set_title(claim, loc="left", fontsize=12, fontweight="bold", color=_INK, pad=26)
    axes.text(
        *(0, 1.025, _plain(f"{report.title}, on {report.device.get('name')}", 120)),
        transform=axes.transAxes,
        fontsize=9,
        color=_SOFT,
    )


def _limits(values: list[float]) -> tuple[float, float]:
    """Return limits around *values*, with room for labels; near points do not fill the plot."""
    low, high = min(values), max(values)
    spread = max(high - low, 0.2 * abs(high)) or 1.0
    middle = (low + high) / 2
    return max(0.0, middle - 0.68 * spread), middle + 0.68 * spread
