"""What a step shows: its sums, what sets the peak, where its time goes, what is waited for most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hf_pyao.plan.documents.step import LANES, StepReport, StepSpan
from hf_pyao.quantities import ABSENT, number
from hf_pyao.tools.report.plots import data as plots
from hf_pyao.tools.report.views.view import Table, View

MOST_STALLS = 8
"""Most slots that are named as waited for."""

_LANE_TEXTS = {
    "forward": "forward of layers",
    "backward": "backward of layers",
    "outside": "compute outside of layers",
    "stall": "compute waits for copies",
    "offload": "copies to the host",
    "reload": "copies to the device",
    "overhead": "work of the engine beside",
}


def step_view(report: StepReport) -> View:
    """Return a step's sums, its lanes, and the slots that are waited for most."""
    stalls = _stall_rows(report)
    tables = [
        Table(["over the step", ""], _total_rows(report)),
        Table(["what runs", "times", "ms", "of the step"], _lane_rows(report)),
    ]
    if stalls:
        tables.append(Table(["waited for", "times", "ms", "of the step"], stalls))
    return View(
        title=report.title,
        summary=_summary(report),
        plots=_plots(report),
        tables=[table for table in tables if table.rows],
        notes=_notes(report),
        provenance=report.provenance,
    )


_ROWS = (
    (
        "compute",
        (("forward", plots.FORWARD), ("backward", plots.BACKWARD), ("outside", plots.QUIET)),
    ),
    ("waiting", (("stall", plots.WAITING),)),
    ("offload", (("offload", plots.OURS),)),
    ("reload", (("reload", plots.RELOAD),)),
    ("overhead", (("overhead", plots.RECOMPUTE),)),
)
"""Rows of the time line, from the top, and the lanes in each."""

_FAR_LIMIT = 2.5
"""A limit so many times above the peak is said, and not drawn: the curve would lie flat."""


def _plots(report: StepReport) -> list[list[plots.Plot]]:
    """Return memory over time, above what runs."""
    by_lane: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
    for span in sorted(report.spans, key=lambda each: each.start_ms):
        by_lane[span.lane].append((span.label, float(span.start_ms), float(span.end_ms)))
    rows = [
        (name, [plots.Lane(family, by_lane[lane]) for lane, family in lanes if lane in by_lane])
        for name, lanes in _ROWS
    ]
    rows = [row for row in rows if row[1]]
    found: list[list[plots.Plot]] = [[_memory(report)]] if report.memory else []
    return [*found, [plots.Lanes(rows=rows, end_ms=float(report.end_ms))]] if rows else found


def _memory(report: StepReport) -> plots.Timeline:
    peak, limit = report.peak, report.limit_bytes
    most = max(float(point.nbytes) for point in report.memory)
    units = ((1e9, "GB"), (1e6, "MB"))
    scale, unit = next((each for each in units if most >= each[0]), (1.0, "bytes"))

    def said(what: str, nbytes: int) -> tuple[float, str]:
        return nbytes / scale, f"{what} {nbytes / scale:,.4g} {unit}"

    return plots.Timeline(
        title="" if peak is None else f"peak in {peak.place}, set by {peak.tensor}",
        times_ms=[float(point.time_ms) for point in report.memory],
        sizes=[point.nbytes / scale for point in report.memory],
        y_label=f"memory on the device, {unit}",
        end_ms=float(report.end_ms),
        limit=None if limit is None or limit > _FAR_LIMIT * most else said("limit", limit),
        peak=None if peak is None else (float(peak.time_ms), *said("peak", peak.nbytes)),
    )


def _summary(report: StepReport) -> str:
    how = "Measured" if report.is_measured else "Predicted"
    said = f"{how}, one step on {report.device}: {number(report.totals.step_ms)} ms."
    peak = report.peak
    if peak is None:
        return said
    return (
        f"{said} The peak is {_gb(peak.nbytes)}, in {peak.place}, set by "
        f"{peak.tensor} ({_gb(peak.tensor_bytes)}); without it, it would be "
        f"{_gb(peak.next_peak_bytes)}."
    )


def _total_rows(report: StepReport) -> list[list[str]]:
    totals, peak = report.totals, report.peak
    times = [
        ("the step", totals.step_ms),
        ("compute alone", totals.compute_ms),
        ("forward waits for copies", totals.stall_forward_ms),
        ("backward waits for copies", totals.stall_backward_ms),
    ]
    sizes = [
        ("peak on the device", None if peak is None else peak.nbytes),
        ("the device can hold", report.limit_bytes),
        ("peak if copies are as late as can be", totals.late_peak_bytes),
        ("leaves the device", totals.offloaded_bytes),
        ("is asked for before it has left", totals.read_in_place_bytes),
        ("peak on the host", totals.host_peak_bytes),
    ]
    rows = [[label, f"{number(value)} ms"] for label, value in times if value is not None]
    return rows + [[label, _gb(value)] for label, value in sizes if value is not None]


def _lane_rows(report: StepReport) -> list[list[str]]:
    by_lane: dict[str, list[StepSpan]] = defaultdict(list)
    for span in report.spans:
        by_lane[span.lane].append(span)
    return [
        _time_row(_LANE_TEXTS[lane], by_lane[lane], report) for lane in LANES if by_lane.get(lane)
    ]


def _stall_rows(report: StepReport) -> list[list[str]]:
    by_label: dict[str, list[StepSpan]] = defaultdict(list)
    for span in report.spans:
        if span.lane == "stall":
            by_label[span.label].append(span)
    longest = sorted(by_label.items(), key=lambda item: -_sum_ms(item[1]))[:MOST_STALLS]
    return [_time_row(label, spans, report) for label, spans in longest]


def _time_row(label: str, spans: Sequence[StepSpan], report: StepReport) -> list[str]:
    total_ms, step_ms = _sum_ms(spans), report.totals.step_ms
    share = f"{total_ms / step_ms:.1%}" if step_ms else ABSENT
    return [label, f"{len(spans):,}", number(total_ms), share]


def _sum_ms(spans: Sequence[StepSpan]) -> float:
    return sum(float(span.end_ms) - span.start_ms for span in spans)


def _notes(report: StepReport) -> list[str]:
    peak, limit = report.peak, report.limit_bytes
    if peak is None or limit is None:
        return []
    if peak.nbytes > limit:
        return [f"It does not fit: {_gb(peak.nbytes - limit)} are too much."]
    return [f"{_gb(limit - peak.nbytes)} are left at the peak."]


def _gb(nbytes: int) -> str:
    if 0 < abs(nbytes) < 10**7:
        return f"{nbytes / 1e6:,.3f} MB"
    return f"{nbytes / 1e9:,.2f} GB"
