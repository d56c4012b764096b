"""What a sweep shows: a row for each budget, the knee, and what the figures may be trusted for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hf_pyao.plan.documents.bench import OK
from hf_pyao.plan.documents.sweep import BYTES, KNEE, Spread, SweepReport, SweepRow
from hf_pyao.quantities import ABSENT, GIB, MIB, number
from hf_pyao.tools.report.plots import data as plots
from hf_pyao.tools.report.views.view import Table, View, cell, table_of

ON_A_CPU = "There was no device: host memory stood in for it, and times say nothing about a GPU."


def sweep_view(report: SweepReport) -> View:
    """Return one table row for each budget, the knee, and notes."""
    summary = "Measured." if report.is_measured else "Predicted; no model ran."
    return View(
        title=report.title,
        summary=f"{summary} Memory is the {report.memory_is}.",
        plots=_plots(report),
        tables=[sweep_table(report)] if report.rows else [],
        conclusion=knee_text(report),
        notes=list(_notes(report)),
        legend=KNEE,
        provenance=report.provenance,
        measured_on=list(_measured_on(report)),
    )


MOST_LABELS = 12
"""About as many points of the trade-off are labelled."""


def _plots(report: SweepReport) -> list[list[plots.Plot]]:
    """Return memory over budgets (NeuroCache's Figure 4) beside throughput over memory (Figure 6).

    Nothing if fewer than two budgets have figures. Bars are standard deviations over seeds.
    """
    found = [
        (row.budget, row.memory_bytes, row.tokens_per_s)
        for row in report.rows
        if row.memory_bytes and row.tokens_per_s
    ][: plots.MOST_POINTS]
    if len(found) < 2:
        return []
    is_large = max(memory.mean for _, memory, _ in found) >= 10 * GIB
    unit, name = (GIB, "GiB") if is_large else (MIB, "MiB")
    scale, what = (MIB, "MiB") if report.budgets_are == BYTES else (1, "tensors")
    every = max(1, -(-len(found) // MOST_LABELS))
    shown = {report.knee, found[-1][0], *(budget for budget, *_ in found[::every])}
    over_budget = [(b / scale, m.mean / unit, 0.0, _off(m, unit), b) for b, m, _ in found]
    trade_off = [(m.mean / unit, t.mean, _off(m, unit), _off(t), b) for b, m, t in found]

    def front(points: Sequence[tuple[float, float, float, float, int]], **more: Any) -> plots.Front:
        x, y, x_off, y_off, _ = map(list, zip(*sorted(points), strict=True))
        knee = next(((x, y, "knee") for x, y, *_, b in points if b == report.knee), None)
        line = plots.Line("", plots.OURS, x, y, (x_off, x_off), (y_off, y_off))
        return plots.Front(lines=[line], marked=knee, **more)

    return [
        [
            front(
                over_budget,
                title="memory over the budget",
                x_label=f"budget of a forward, {what}",
                y_label=f"memory, {name}",
            ),
            front(
                trade_off,
                title="throughput over memory",
                x_label=f"memory, {name}: less to the left",
                y_label="tokens/s",
                names=[(x, y, budget_text(report, b)) for x, y, *_, b in trade_off if b in shown],
            ),
        ]
    ]


def _off(spread: Spread, unit: float = 1.0) -> float:
    """Return the standard deviation, which is not negative whatever a report says."""
    return max(0.0, spread.standard_deviation) / unit


def knee_text(report: SweepReport) -> str:
    """Say where the knee is, or why there is none."""
    if report.knee is None:
        return f"No knee, because {report.knee_reason}.{_least_memory(report)}"
    return f"The knee is at {budget_text(report, report.knee)}, because {report.knee_reason}."


def _least_memory(report: SweepReport) -> str:
    """Say where a sweep without a knee has least memory: the smallest budget of such."""
    known = [(row.memory_bytes.mean, row.budget) for row in report.rows if row.memory_bytes]
    if not known or known[0][0] == min(known)[0]:
        return ""
    least_bytes, budget = min(known)
    return f" The least memory, {size_text(least_bytes)}, is at {budget_text(report, budget)}."


def budget_text(report: SweepReport, budget: int) -> str:
    """Return *budget* with its unit."""
    if report.budgets_are != BYTES:
        return f"{budget:,} tensor{'s' * (budget != 1)}"
    return size_text(budget) if budget else "0 bytes"


def size_text(num_bytes: float) -> str:
    """Return bytes with the unit that suits them, and as many digits as tell neighbours apart."""
    if num_bytes >= 10 * GIB:
        return f"{num_bytes / GIB:,.2f} GiB"
    return f"{num_bytes / MIB:,.1f} MiB"


def sweep_table(report: SweepReport) -> Table:
    """Return a sweep's table; columns that no row has a figure for are left out."""
    rows = report.rows
    first = "k, tensors" if report.budgets_are != BYTES else "budget"
    host = "host memory, resident" if report.is_measured else "host memory"
    columns: list[tuple[str, Callable[[SweepRow], str]]] = [
        (first, lambda row: _budget(report, row)),
        ("result", lambda row: _result(row, is_measured=report.is_measured)),
        ("leaves, MiB", lambda row: cell(row.offloaded_bytes, ",.1f", MIB)),
        ("memory, MiB", lambda row: _spread(row.memory_bytes, MIB)),
        ("saved", lambda row: _saved(row, rows[0])),
        (f"{host}, MiB", lambda row: _spread(row.host_bytes, MIB)),
        ("step, ms", lambda row: _spread(row.step_ms)),
        ("tokens/s", lambda row: _spread(row.tokens_per_s)),
        ("least to most", lambda row: _range(row.tokens_per_s)),
        ("pack time, ms", lambda row: _spread(row.pack_ms)),
        ("stalls, ms", lambda row: _spread(row.stall_ms)),
    ]
    return table_of(rows, columns)


def _budget(report: SweepReport, row: SweepRow) -> str:
    text = f"{row.budget:,}" if report.budgets_are != BYTES else budget_text(report, row.budget)
    return f"{text} (knee)" if row.budget == report.knee else text


def _result(row: SweepRow, *, is_measured: bool) -> str:
    if row.status != OK:
        return row.status
    text = "measured" if is_measured else "predicted"
    return f"{text} in part" if row.reason else text


def _saved(row: SweepRow, base: SweepRow) -> str:
    if row.memory_bytes is None or base.memory_bytes is None or not base.memory_bytes.mean:
        return ABSENT
    return f"{1 - row.memory_bytes.mean / base.memory_bytes.mean:.1%}"


def _spread(spread: Spread | None, unit: float = 1.0) -> str:
    if spread is None:
        return ABSENT
    mean = spread.mean / unit
    text = f"{mean:,.1f}" if mean >= 10 else number(mean)
    if spread.num_figures < 2:
        return text
    deviation = spread.standard_deviation / unit
    return f"{text} ± {number(deviation) if deviation else '0'}"


def _range(spread: Spread | None) -> str:
    if spread is None or spread.num_figures < 2:
        return ABSENT
    return f"{spread.least:,.1f}–{spread.most:,.1f}"


def _notes(report: SweepReport) -> Iterator[str]:
    if report.are_losses_equal is not None:
        yield _equality("losses", report.are_losses_equal)
        yield _equality("gradients", bool(report.are_gradients_equal))
    elif report.is_measured:
        yield "losses and gradients were not compared: no seed has two budgets with both."
    if report.drift:
        shown = ", ".join(f"{share:+.1%}" for share in report.drift)
        yield (
            f"noise of the machine: budget 0 ran first and again last, and its throughput differed "
            f"by {shown} (by seed)."
        )
    if report.noise_tokens_per_s is not None:
        yield (
            f"{report.noise_tokens_per_s:,.1f} tokens/s is twice the standard deviation at one "
            "budget, all budgets pooled; smaller differences say nothing."
        )
    yield from _all_that_can_leave(report)
    for row in report.rows:
        if row.reason:
            yield f"{budget_text(report, row.budget)}: {row.reason}."
    if len(report.points) < report.num_planned:
        yield f"interrupted: {len(report.points)} of {report.num_planned} points are done."
    if report.is_measured and report.device.get("memory_gib") is None:
        yield ON_A_CPU
    for text in report.assumptions:
        yield f"assumed: {text}"


def _all_that_can_leave(report: SweepReport) -> Iterator[str]:
    """Say from which budget on nothing more leaves."""
    known = [row for row in report.rows if row.offloaded_bytes is not None]
    if not known or not known[-1].offloaded_bytes:
        return
    most_bytes = known[-1].offloaded_bytes
    first = next(row for row in known if row.offloaded_bytes == most_bytes)
    if first is not known[-1]:
        yield (
            f"{size_text(most_bytes)} is all that can leave: budgets above "
            f"{budget_text(report, first.budget)} change nothing."
        )


def _equality(what: str, are_equal: bool) -> str:
    if are_equal:
        return f"{what} do not depend on the budget: equal bits at all budgets of each seed."
    return f"{what.upper()} DIFFER between budgets of a seed. They must not: please report it."


def _measured_on(report: SweepReport) -> Iterator[str]:
    device = report.device
    if not report.is_measured:
        source = device.get("source")
        yield f"{device.get('name')}" + (f" ({source})" if source else "")
        yield from _speeds(report)
        return
    yield str(device.get("name")) + (f", driver {device['driver']}" if device.get("driver") else "")
    steps, warmup = report.setup.get("num_steps"), report.setup.get("num_warmup")
    yield f"median of {steps} steps after {warmup} warm-up steps"
    yield f"order of budgets shuffled with seed {report.setup.get('order_seed')}"


def _speeds(report: SweepReport) -> Iterator[str]:
    model, link = report.device.get("device"), report.device.get("link")
    if isinstance(model, dict) and isinstance(link, dict):
        yield (
            f"taken as {model.get('tflop_per_s')} TFLOP/s, "
            f"{_rounded(model.get('memory_gib_per_s'))} GiB/s of memory, "
            f"{_rounded(link.get('d2h_gib_per_s'))} GiB/s to the host"
        )


def _rounded(value: object) -> str:
    return f"{value:,.1f}" if isinstance(value, int | float) else ABSENT
