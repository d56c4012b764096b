"""What a training run shows: what was moved, kept and waited for, per micro-batch."""

from __future__ import annotations

from hf_pyao.plan.documents.run import RunReport
from hf_pyao.quantities import ABSENT, quantity
from hf_pyao.tools.report.views.view import Table, View

_KEPT = "kept_bytes/"
_NOT_RECOMPUTED = "not_recomputed_bytes/"


def run_view(report: RunReport) -> View:
    """Return what a training run moved, kept and waited for."""
    return View(
        title=report.title,
        summary=report.description,
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
