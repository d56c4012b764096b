"""What a choice of micro-batch, length or depth shows: a row for each size, and the choice."""

from __future__ import annotations

from collections.abc import Callable

from hf_pyao.plan.documents.microbatch import (
    MODEL_SIZE,
    SEQUENCE,
    MicroBatchReport,
    MicroBatchRow,
)
from hf_pyao.quantities import ABSENT, GIB, number
from hf_pyao.tools.report.views.view import Table, View, cell, others_columns, table_of


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
    find, card = report.find, str(report.hardware.get("name", ""))

    def size(row: MicroBatchRow) -> str:
        return f"{_asked(row, find):,}" + (" (chosen)" if row == report.chosen else "")

    def other(row: MicroBatchRow) -> str:
        return str(row.accumulation if beside == "accumulation" else row.micro_batch)

    columns: list[tuple[str, Callable[[MicroBatchRow], str]]] = [
        (first, size),
        (beside, other),
        ("fits", lambda row: "yes" if row.fits else "no"),
        ("allocated, GiB", lambda r: f"{r.peak_bytes / GIB:.2f}{'' if r.fits else ' at least'}"),
        ("reserved, GiB", lambda row: cell(row.reserved_bytes, ".2f", GIB)),
        ("host, GiB", lambda row: cell(row.host_bytes, ".2f", GIB)),
        ("step, ms", lambda row: ABSENT if row.step_ms is None else number(row.step_ms)),
        *others_columns(card, _step_ms),
        ("ms/sample", lambda row: ABSENT if row.sample_ms is None else number(row.sample_ms)),
        ("plan", lambda row: row.plan),
    ]
    return table_of(report.rows, columns, keeps_all=True)


def _step_ms(row: MicroBatchRow) -> float | None:
    return row.step_ms


def _asked(row: MicroBatchRow, find: str) -> int:
    """Return the size of *row* that was looked for."""
    if find == MODEL_SIZE:
        return row.num_layers or 0
    return row.sequence_length if find == SEQUENCE else row.micro_batch
