"""Reports as Markdown tables, each with its provenance beneath."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_pyao.report.bench_report import OK, REFERENCE, BenchReport, BenchRow, FactsReport
from hf_pyao.report.documents import Document
from hf_pyao.report.estimate_report import EstimateReport, estimate_notes, estimate_table
from hf_pyao.report.markdown import code, paragraph, table
from hf_pyao.report.profile_report import Profile, profile_summary, profile_tables
from hf_pyao.report.provenance import Provenance
from hf_pyao.report.run_report import RunReport

GIB = 2**30
MIB = 2**20
ABSENT = "–"
ON_A_CPU = "There was no device: host memory stood in for it, and times say nothing about a GPU."
_KEPT = "kept_bytes/"
_NOT_RECOMPUTED = "not_recomputed_bytes/"


def markdown_of(document: Document) -> str:
    """Return *document* as Markdown."""
    if isinstance(document, BenchReport):
        return bench_markdown(document)
    if isinstance(document, RunReport):
        return run_markdown(document)
    if isinstance(document, EstimateReport):
        return estimate_markdown(document)
    if isinstance(document, Profile):
        return profile_markdown(document)
    return facts_markdown(document)


def estimate_markdown(report: EstimateReport) -> str:
    """Return the heading, one table row for each way to train, what follows, and the provenance."""
    verdict, *notes = estimate_notes(report)
    parts = [
        f"## {paragraph(report.title)}",
        table(*estimate_table(report)),
        paragraph(verdict),
        "\n".join(f"- {paragraph(line)}" for line in notes),
        provenance_line(report, text=paragraph, command=code),
    ]
    return "\n\n".join(parts) + "\n"


def profile_markdown(profile: Profile) -> str:
    """Return the heading, what was measured, parts and slots, and the provenance."""
    parts = [
        f"## {paragraph(profile.title)}",
        paragraph(profile_summary(profile)),
        *(table(*each) for each in profile_tables(profile)),
        provenance_line(profile, text=paragraph, command=code),
    ]
    return "\n\n".join(parts) + "\n"


def bench_markdown(report: BenchReport) -> str:
    """Return the heading, one table row for each method, and the provenance."""
    header, rows = bench_table(report)
    parts = [
        f"## {paragraph(report.title)}",
        table(header, rows),
        "\n".join(f"- {paragraph(line)}" for line in reasons(report)),
        paragraph(legend(report)),
        provenance_line(report, text=paragraph, command=code),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def bench_table(report: BenchReport) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of a benchmark's table.

    Columns that no row has a figure for are left out.
    """
    reference = report.row_of(REFERENCE)
    columns: list[tuple[str, list[str]]] = [
        ("method", [row.method for row in report.rows]),
        *_columns(report.rows, reference, report.is_search),
    ]
    filled = [c for c in columns if any(cell != ABSENT for cell in c[1])]
    lines = zip(*(cells for _, cells in filled), strict=True)
    return [name for name, _ in filled], [list(line) for line in lines]


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


def run_markdown(report: RunReport) -> str:
    """Return what a training run moved, kept and waited for."""
    return (
        "\n\n".join(
            [
                f"## {paragraph(report.title)}",
                paragraph(report.description),
                *(table(header, rows) for header, rows in run_tables(report)),
                provenance_line(report, text=paragraph, command=code),
            ]
        )
        + "\n"
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


def run_tables(report: RunReport) -> list[tuple[list[str], list[list[str]]]]:
    """Return header and cells of each of a run's tables; the last only if it has rows."""
    tables = [
        (["per micro-batch", "mean over the run", "last"], run_rows(report)),
        (["kept on the device because", "mean over the run"], kept_rows(report)),
    ]
    not_recomputed = _by_reason(report, _NOT_RECOMPUTED)
    if not_recomputed:
        header = ["to be recomputed, but kept or moved because", "mean over the run"]
        tables.append((header, not_recomputed))
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


def facts_markdown(report: FactsReport) -> str:
    """Return facts as a table of two columns."""
    rows = [[name, fact_text(value)] for name, value in report.facts.items()]
    source = provenance_line(report, text=paragraph, command=code)
    return f"## {paragraph(report.title)}\n\n{table(['', ''], rows)}\n\n{source}\n"


def provenance_line(
    report: Document,
    *,
    text: Callable[[str], str],
    command: Callable[[str], str],
) -> str:
    """Return in one paragraph where the figures come from.

    *text* and *command* make page text of what the report says: of its words, of a command line.
    """
    source: Provenance = report.provenance
    parts = [source.created_at]
    if source.commit is None:
        parts.append(f"source {source.source_sha256}")
    else:
        changed = " with changes" if source.is_dirty else ""
        parts.append(f"commit {source.commit[:12]}{changed}, source {source.source_sha256}")
    parts += [f"{name} {version}" for name, version in source.versions.items() if version]
    parts.append(f"{source.host.get('processor')}, {source.host.get('num_cores')} cores")
    measured = _bench_parts(report) if isinstance(report, BenchReport) else []
    shown = [*map(text, measured), command(source.command), *map(text, parts)]
    return "; ".join(shown) + "."


def _bench_parts(report: BenchReport) -> list[str]:
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


def number(value: float) -> str:
    """Return *value* with three significant digits or whole, whichever is more."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def quantity(key: str, value: float) -> str:
    """Return a metric's value with the unit that its key names."""
    if key.endswith("_ms"):
        return f"{number(value)} ms"
    if value >= GIB:
        return f"{value / GIB:,.2f} GiB"
    return f"{value / MIB:,.2f} MiB"


def fact_text(value: Any) -> str:
    """Return a fact as a table shows it."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ABSENT}[value]
    if isinstance(value, float):
        return number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {fact_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(fact_text, value))
    return str(value)


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
