"""What benchmarks and facts show: their tables and plots, and what is said beneath."""

from __future__ import annotations

from collections.abc import Callable

from hf_pyao.plan.documents.bench import OK, REFERENCE, BenchReport, BenchRow, FactsReport
from hf_pyao.quantities import ABSENT, GIB, fact_text, number
from hf_pyao.tools.report.plots import data as plots
from hf_pyao.tools.report.views.view import Table, View, cell, table_of

ON_A_CPU = "There was no device: host memory stood in for it, and times say nothing about a GPU."


def bench_view(report: BenchReport) -> View:
    """Return one table row for each method, why some have none, and what the methods are."""
    plot = _largest_of(report) if report.is_search else _trade_off(report)
    return View(
        title=report.title,
        plots=[] if plot is None else [[plot]],
        tables=[bench_table(report)],
        notes=reasons(report),
        legend=legend(report),
        provenance=report.provenance,
        measured_on=_measured_on(report),
    )


def facts_view(report: FactsReport) -> View:
    """Return facts as a table of two columns."""
    rows = [[name, fact_text(value)] for name, value in report.facts.items()]
    return View(
        title=report.title,
        tables=[Table(["fact", "value"], rows)],
        provenance=report.provenance,
    )


def bench_table(report: BenchReport) -> Table:
    """Return a benchmark's table.

    Columns that no row has a figure for are left out.
    """
    reference = report.row_of(REFERENCE)
    base = reference.step if reference is not None else None

    def against_nothing(row: BenchRow) -> str:
        if row.step is None or base is None or not base.median_ms or report.is_search:
            return ABSENT  # at different micro-batches, times do not compare
        return f"{row.step.median_ms / base.median_ms:.2f}×"

    def shown(get: Callable[[BenchRow], int | None]) -> Callable[[BenchRow], str]:
        return lambda row: cell(get(row), ".2f", GIB)

    columns: list[tuple[str, Callable[[BenchRow], str]]] = [
        ("method", lambda row: row.method),
        ("result", lambda row: "measured" if row.status == OK else row.status),
        ("largest micro-batch", _largest),
        ("step, ms", lambda row: ABSENT if row.step is None else number(row.step.median_ms)),
        ("against nothing", against_nothing),
        ("quartiles, ms", _quartiles),
        ("tokens/s", lambda row: cell(row.tokens_per_s, ",.0f")),
        ("held after forward, GiB", shown(lambda row: row.after_forward_bytes)),
        ("peak allocated, GiB", shown(lambda row: row.peak_allocated_bytes)),
        ("peak reserved, GiB", shown(lambda row: row.peak_reserved_bytes)),
        ("host memory +GiB", shown(lambda row: row.rss_growth_bytes)),
        ("pinned, GiB", shown(lambda row: row.pinned_bytes)),
        ("loss and gradients", _parity),
    ]
    return table_of(report.rows, columns)


def _quartiles(row: BenchRow) -> str:
    if row.step is None:
        return ABSENT
    return f"{number(row.step.lower_quartile_ms)}–{number(row.step.upper_quartile_ms)}"


def reasons(report: BenchReport) -> list[str]:
    """Return, for each row that is not plainly measured, why; and what a CPU cannot tell."""
    notes = [f"{row.method}: {row.reason}." for row in report.rows if row.reason]
    return notes if report.device.get("memory_gib") else [*notes, ON_A_CPU]


def legend(report: BenchReport) -> str:
    """Return in one line what the methods are."""
    return "Methods: " + "; ".join(f"{row.method}: {row.label}" for row in report.rows) + "."


def _measured_on(report: BenchReport) -> list[str]:
    device = report.device
    parts = [str(device.get("name"))]
    if device.get("driver"):
        parts[0] += f", driver {device['driver']}"
    link = report.link
    speeds = [link.get(f"{name}_gib_per_s") for name in ("d2h", "h2d", "both")]
    if speeds[0]:
        d2h, h2d, both = ("?" if speed is None else f"{speed:.1f}" for speed in speeds)
        parts.append(f"link {d2h} GiB/s to the host, {h2d} to the device, {both} both together")
    steps = {(s.num_steps, s.num_warmup) for row in report.rows if (s := row.step) is not None}
    parts += [f"median of {n} steps after {warm} warm-up steps" for n, warm in sorted(steps)]
    parts.append(f"seed {report.setup.get('seed')}, gradients {report.setup.get('gradients')}")
    return parts


def _largest(row: BenchRow) -> str:
    return ABSENT if row.num_tried is None else str(row.micro_batch)


def _parity(row: BenchRow) -> str:
    if row.method == REFERENCE and row.gradient_digest is not None:
        return "reference"
    if row.is_loss_equal is None:
        return ABSENT
    if row.is_loss_equal and row.are_gradients_equal:
        return "equal bits"
    return "gradients differ" if row.is_loss_equal else "loss differs"


# ---- plots -----------------------------------------------------------------------------------


def family_of(method: str) -> plots.Family:
    """Return the family of a method, by its name."""
    if method == REFERENCE:
        return plots.NOTHING
    if method.startswith(("pyao", "policy")):
        return plots.OURS
    return plots.RECOMPUTE if method.startswith(("checkpoint", "deepspeed")) else plots.OFFLOAD


def _trade_off(report: BenchReport) -> plots.Front | None:
    """Return memory versus time: one point for each measured method."""
    measured = [row for row in report.rows if row.step is not None]
    on_device = [row for row in measured if row.peak_allocated_bytes is not None]
    rows = on_device or [row for row in measured if row.rss_growth_bytes is not None]
    what = "peak of allocated device memory" if on_device else "growth of host memory (no device)"
    if not rows:
        return None
    return plots.Front(
        title=f"Memory versus time, on {report.device.get('name')}: the lower left is better",
        lines=[_point(row) for row in rows[: plots.MOST_POINTS]],
        x_label="time of one step, ms: median and quartiles (axes may begin above 0)",
        y_label=f"{what}, GiB",
    )


def _point(row: BenchRow) -> plots.Line:
    """Return a method's point; quartiles are on both sides of it whatever a report says."""
    assert row.step is not None
    nbytes = row.peak_allocated_bytes
    memory = (row.rss_growth_bytes or 0) if nbytes is None else nbytes
    median_ms = float(row.step.median_ms)
    errors = (
        [max(0.0, median_ms - row.step.lower_quartile_ms)],
        [max(0.0, row.step.upper_quartile_ms - median_ms)],
    )
    return plots.Line(row.method, family_of(row.method), [median_ms], [memory / GIB], errors)


def _largest_of(report: BenchReport) -> plots.Plot | None:
    """Return the largest micro-batch of each method, as bars."""
    rows = [row for row in report.rows if row.num_tried is not None]
    rows = sorted(rows, key=lambda row: row.micro_batch)[-plots.MOST_POINTS :][::-1]
    bars = [plots.Bar(r.method, r.micro_batch, family_of(r.method), _bar_text(r)) for r in rows]
    title = f"Largest micro-batch, on {report.device.get('name')}: longer is better"
    label = "largest micro-batch that fits, sequences"
    return plots.Bars(title=title, bars=bars, x_label=label) if bars else None


def _bar_text(row: BenchRow) -> str:
    if row.step is not None and row.tokens_per_s is not None:
        return f"{row.micro_batch}   {row.tokens_per_s:,.0f} tokens/s"
    return f"{row.micro_batch}" if row.status == OK else f"{row.micro_batch}   {row.status}"
