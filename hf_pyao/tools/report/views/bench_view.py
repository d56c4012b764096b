"""What benchmarks and facts show: their tables, and what is said beneath."""

from __future__ import annotations

from collections.abc import Sequence

from hf_pyao.plan.documents.bench import OK, REFERENCE, BenchReport, BenchRow, FactsReport
from hf_pyao.quantities import ABSENT, GIB, fact_text, number
from hf_pyao.tools.report.views.view import Table, View

ON_A_CPU = "There was no device: host memory stood in for it, and times say nothing about a GPU."


def bench_view(report: BenchReport) -> View:
    """Return one table row for each method, why some have none, and what the methods are."""
    return View(
        title=report.title,
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
    columns: list[tuple[str, list[str]]] = [
        ("method", [row.method for row in report.rows]),
        *_columns(report.rows, reference, report.is_search),
    ]
    filled = [c for c in columns if any(cell != ABSENT for cell in c[1])]
    lines = zip(*(cells for _, cells in filled), strict=True)
    return Table([name for name, _ in filled], [list(line) for line in lines])


def _columns(
    rows: Sequence[BenchRow], reference: BenchRow | None, is_search: bool
) -> list[tuple[str, list[str]]]:
    step = [row.step for row in rows]
    base = reference.step if reference is not None else None
    columns = [
        ("result", ["measured" if row.status == OK else row.status for row in rows]),
        *([("largest micro-batch", [_largest(row) for row in rows])] if is_search else []),
        ("step, ms", [ABSENT if s is None else number(s.median_ms) for s in step]),
        (
            "quartiles, ms",
            [
                ABSENT
                if s is None
                else f"{number(s.lower_quartile_ms)}–{number(s.upper_quartile_ms)}"
                for s in step
            ],
        ),
        ("tokens/s", [_whole(row.tokens_per_s) for row in rows]),
        ("held after forward, GiB", [_gib(row.after_forward_bytes) for row in rows]),
        ("peak allocated, GiB", [_gib(row.peak_allocated_bytes) for row in rows]),
        ("peak reserved, GiB", [_gib(row.peak_reserved_bytes) for row in rows]),
        ("host memory +GiB", [_gib(row.rss_growth_bytes) for row in rows]),
        ("pinned, GiB", [_gib(row.pinned_bytes) for row in rows]),
        ("loss and gradients", [_parity(row) for row in rows]),
    ]
    if not is_search:  # at different micro-batches, times do not compare
        ratio = [
            ABSENT
            if s is None or base is None or not base.median_ms
            else f"{s.median_ms / base.median_ms:.2f}×"
            for s in step
        ]
        columns.insert(2, ("against nothing", ratio))
    return columns


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


def _whole(value: float | None) -> str:
    return ABSENT if value is None else f"{value:,.0f}"


def _gib(value: int | None) -> str:
    return ABSENT if value is None else f"{value / GIB:.2f}"


def _parity(row: BenchRow) -> str:
    if row.method == REFERENCE and row.gradient_digest is not None:
        return "reference"
    if row.is_loss_equal is None:
        return ABSENT
    if row.is_loss_equal and row.are_gradients_equal:
        return "equal bits"
    return "gradients differ" if row.is_loss_equal else "loss differs"
