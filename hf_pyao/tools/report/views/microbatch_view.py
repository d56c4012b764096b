"""What a choice of micro-batch or length shows: a row for each size, and the choice."""

from __future__ import annotations

from hf_pyao.plan.documents.microbatch import SEQUENCE, MicroBatchReport
from hf_pyao.quantities import ABSENT, GIB, number
from hf_pyao.tools.report.views.view import Table, View


def microbatch_view(report: MicroBatchReport) -> View:
    """Return the choice, the table of what was looked at, and what is assumed."""
    return View(
        title=report.title,
        summary=report.verdict,
        tables=[microbatch_table(report)],
        notes=[f"assumed: {text}" for text in report.assumptions],
        provenance=report.provenance,
    )


def microbatch_table(report: MicroBatchReport) -> Table:
    """Return a row for each size; the one that was chosen is marked."""
    is_length = report.find == SEQUENCE
    header = [
        "sequence" if is_length else "micro-batch",
        "micro-batch" if is_length else "accumulation",
        "fits",
        "allocated, GiB",
        "reserved, GiB",
        "step, ms",
        "ms/sample",
        "plan",
    ]
    rows = [
        [
            f"{row.sequence_length if is_length else row.micro_batch:,}"
            + (" (chosen)" if row == report.chosen else ""),
            str(row.micro_batch if is_length else row.accumulation),
            "yes" if row.fits else "no",
            f"{row.peak_bytes / GIB:.2f}" + ("" if row.fits else " at least"),
            ABSENT if row.reserved_bytes is None else f"{row.reserved_bytes / GIB:.2f}",
            ABSENT if row.step_ms is None else number(row.step_ms),
            ABSENT if row.sample_ms is None else number(row.sample_ms),
            row.plan,
        ]
        for row in report.rows
    ]
    return Table(header, rows)
