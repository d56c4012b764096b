"""What a training run shows: what was moved, kept and waited for, per micro-batch."""

from __future__ import annotations

from hf_pyao.plan.documents.run import RunReport
from hf_pyao.quantities import ABSENT, GIB, MIB, number, quantity
from hf_pyao.tools.report.plots import data as plots
from hf_pyao.tools.report.views.view import Table, View

_KEPT = "kept_bytes/"
_NOT_RECOMPUTED = "not_recomputed_bytes/"


def run_view(report: RunReport) -> View:
    """Return what a training run moved, kept and waited for."""
    return View(
        title=report.title,
        summary=report.description,
        plots=_plots(report),
        tables=run_tables(report),
        provenance=report.provenance,
    )


RUN_FIGURES = (
    ("would_hold_bytes", "autograd would have held on the device"),
    ("held_bytes", "held on the device"),
    ("offloaded_bytes", "moved to the host"),
    ("reloaded_bytes", "moved back"),
    ("duplicate_bytes", "equal to what was moved, and let go"),
    ("recomputed_bytes", "dropped, and recomputed"),
    ("link_bytes", "crossed the link, both ways"),
    ("transfer_ms", "copies ran"),
    ("stall_forward_ms", "forward waited for copies"),
    ("stall_backward_ms", "backward waited for copies"),
)
"""Keys of the metrics that are sums over a micro-batch, and what they are."""

_SIZES = (
    ("would_hold_bytes", plots.NOTHING),
    ("held_bytes", plots.RECOMPUTE),
    ("offloaded_bytes", plots.OURS),
    ("recomputed_bytes", plots.OFFLOAD),
)
_TIMES = (
    ("transfer_ms", plots.OURS),
    ("stall_forward_ms", plots.RECOMPUTE),
    ("stall_backward_ms", plots.RECOMPUTE),
)
_LAYER_PARTS = (
    ("kept_bytes", "kept", plots.RECOMPUTE),
    ("moved_bytes", "moved", plots.OURS),
    ("recomputed_bytes", "recomputed", plots.OFFLOAD),
    ("streamed_weight_bytes", "streamed weights", plots.RELOAD),
)
"""What a layer's bar consists of, from below."""


def _plots(report: RunReport) -> list[list[plots.Plot]]:
    """Return where bytes were, what copies cost, and what became of each layer's bytes."""
    num_micro_batches = report.totals.get("num_micro_batches", 0)
    if not num_micro_batches:
        return []
    labels = dict(RUN_FIGURES)

    def mean(key: str) -> float:
        return float(report.totals.get(key, 0)) / max(1, num_micro_batches)

    sizes = [
        (labels[key], mean(key), family)
        for key, family in _SIZES
        if key != "recomputed_bytes" or mean(key)
    ]
    reasons = [reason for reason, _ in kept_rows(report)[:5]]
    sizes += [(f"kept: {reason}", mean(f"{_KEPT}{reason}"), plots.QUIET) for reason in reasons]
    scale, unit = _unit_of(max(size for _, size, _ in sizes))
    bars = [plots.Bar(label, s / scale, family, number(s / scale)) for label, s, family in sizes]
    times = [plots.Bar(labels[key], mean(key), family, number(mean(key))) for key, family in _TIMES]
    ms, per = "ms per micro-batch, mean over the run", "per micro-batch, mean over the run"
    found: list[list[plots.Plot]] = [
        [
            plots.Bars(title="saved for backward", bars=bars, x_label=f"{unit} {per}"),
            plots.Bars(title="copies, and waits for them", bars=times, x_label=ms),
        ]
    ]
    if report.layers:
        found.append([_layers(report)])
    return found


def _layers(report: RunReport) -> plots.Columns:
    """Return what became of each layer's bytes, in forward order."""
    sizes = {key: [getattr(each, key) for each in report.layers] for key, *_ in _LAYER_PARTS}
    scale, unit = _unit_of(max(map(sum, zip(*sizes.values(), strict=True))))
    return plots.Columns(
        title="what became of each layer's bytes",
        parts=[
            (label, family, [size / scale for size in sizes[key]])
            for key, label, family in _LAYER_PARTS
            if any(sizes[key])
        ]
        or [("kept", plots.RECOMPUTE, [0.0] * len(report.layers))],
        x_label="layer, in forward order",
        y_label=f"{unit} per micro-batch",
    )


def _unit_of(most: float) -> tuple[int, str]:
    return (GIB, "GiB") if most >= GIB else (MIB, "MiB")


_OFTEN_NONE = ("duplicate_bytes", "recomputed_bytes")
"""Of these, the ones that have a row only where there is something to tell."""

RUN_PEAKS = (
    ("device_peak_bytes", "device memory, peak"),
    ("host_peak_bytes", "host memory in use, peak"),
    ("pool_bytes", "host memory reserved"),
)
"""Keys of the metrics that are peaks over the run."""


def run_tables(report: RunReport) -> list[Table]:
    """Return a run's tables; those behind the first two only if they have rows."""
    tables = [
        Table(["per micro-batch", "mean over the run", "last"], run_rows(report)),
        Table(["kept on the device because", "mean over the run"], kept_rows(report)),
    ]
    not_recomputed = _by_reason(report, _NOT_RECOMPUTED)
    if not_recomputed:
        header = ["to be recomputed, but kept or moved because", "mean over the run"]
        tables.append(Table(header, not_recomputed))
    if report.no_effect:
        keys = ("setting", "seen", "reason", "remedy")
        rows = [[fact.get(key, ABSENT) for key in keys] for fact in report.no_effect]
        tables.append(Table(["without effect", "seen", "reason", "remedy"], rows))
    return tables


def run_rows(report: RunReport) -> list[list[str]]:
    """Return the cells of a run's table."""
    num_micro_batches = report.totals.get("num_micro_batches", 0)
    rows = []
    for key, label in RUN_FIGURES:
        total = report.totals.get(key)
        if total is None or (key in _OFTEN_NONE and not total):
            continue
        mean = quantity(key, total / max(1, num_micro_batches))
        last = report.last_micro_batch.get(key)
        rows.append([label, mean, ABSENT if last is None else quantity(key, last)])
    efficiency = report.totals.get("overlap_efficiency")
    if efficiency is not None:
        last = report.last_micro_batch.get("overlap_efficiency", efficiency)
        rows.append(["copies hidden under compute", f"{efficiency:.0%}", f"{last:.0%}"])
    for key, label in RUN_PEAKS:
        if report.totals.get(key):
            rows.append([label, quantity(key, report.totals[key]), ABSENT])
    rows.append(["micro-batches", f"{num_micro_batches:,.0f}", ABSENT])
    return rows


def kept_rows(report: RunReport) -> list[list[str]]:
    """Return reasons and bytes of what stayed, most first."""
    return _by_reason(report, _KEPT)


def _by_reason(report: RunReport, prefix: str) -> list[list[str]]:
    counted = {
        key.removeprefix(prefix): value
        for key, value in report.totals.items()
        if key.startswith(prefix) and value
    }
    num_micro_batches = max(1, report.totals.get("num_micro_batches", 0))
    return [
        [reason, quantity("_bytes", counted[reason] / num_micro_batches)]
        for reason in sorted(counted, key=lambda reason: -counted[reason])
    ]
