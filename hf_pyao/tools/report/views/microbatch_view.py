"""What a choice of micro-batch, length or depth shows: a row for each size, and the choice."""

from __future__ import annotations

from hf_pyao.plan.documents.microbatch import (
    MODEL_SIZE,
    SEQUENCE,
    MicroBatchReport,
    MicroBatchRow,
)
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
    first, beside = {
        SEQUENCE: ("sequence", "micro-batch"),
        MODEL_SIZE: ("layers", "micro-batch"),
    }.get(report.find, ("micro-batch", "accumulation"))
    header = [
        first,
        beside,
        "fits",
        "allocated, GiB",
        "reserved, GiB",
        "step, ms",
        "ms/sample",
        "plan",
    ]
    rows = [
        [
            f"{_asked(row, report.find):,}" + (" (chosen)" if row == report.chosen else ""),
            str(row.accumulation if beside == "accumulation" else row.micro_batch),
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


def _asked(row: MicroBatchRow, find: str) -> int:
    """Return the size of *row* that was looked for."""
    if find == MODEL_SIZE:
        return row.num_layers or 0
    return row.sequence_length if find == SEQUENCE else row.micro_batch
