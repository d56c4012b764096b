"""What an estimate shows: a row for each way to train, the verdict, what sets each peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_pyao.plan.documents.estimate import EstimateReport, EstimateRow
from hf_pyao.plan.documents.step import place_of
from hf_pyao.quantities import ABSENT
from hf_pyao.tools.report.views.view import Table, View, cell, others_columns, table_of


def estimate_view(report: EstimateReport) -> View:
    """Return the verdict, one table row for each way to train, and what sets each peak."""
    notes = [
        *map(_cause, report.rows),
        *_inside(report.rows),
        *_limit(report),
        *(f"assumed: {each}" for each in report.assumptions),
    ]
    return View(
        title=report.title,
        summary=report.verdict,
        tables=[estimate_table(report)],
        notes=list(dict.fromkeys(notes)),
        provenance=report.provenance,
    )


def estimate_table(report: EstimateReport) -> Table:
    """Return an estimate's table; columns that no row has a figure for are left out."""
    card = str(report.hardware.get("name", ""))
    columns: list[tuple[str, Callable[[EstimateRow], str]]] = [
        ("method", lambda row: row.method),
        ("largest micro-batch", lambda row: _number(row.largest_micro_batch)),
        ("tokens/s", lambda row: f"{row.tokens_per_s:,.0f}"),
        ("step, ms", lambda row: f"{row.step_ms:,.1f}"),
        *others_columns(card, _step_ms),
        ("reserved, GB", lambda r: _gb(r.reserved_bytes) + ("" if r.fits else " (too much)")),
        ("host, GB", lambda row: _gb(row.host_bytes)),
        ("longest sequence", _length),
        ("with expandable segments", lambda row: _number(row.largest_with_expandable_segments)),
        ("at micro-batch", lambda row: str(row.micro_batch)),
        ("allocated, GB", lambda row: _gb(row.peak_bytes)),
        ("inside kernels, GB", lambda r: _gb(r.workspace_bytes if r.workspace_of else None)),
        ("copies hidden", lambda row: cell(row.hidden, ".0%")),
        ("layers streamed", lambda row: _streamed(row)[0]),
        ("weights on the host, GB", lambda row: _streamed(row)[1]),
        ("tokens to hide uploads", lambda row: _streamed(row)[2]),
    ]
    return table_of(report.rows, columns)


def _step_ms(row: EstimateRow) -> float | None:
    return row.step_ms


def _streamed(row: EstimateRow) -> tuple[str, str, str]:
    stay, tokens, clock = (
        row.num_resident_blocks,
        row.tokens_to_hide,
        row.tokens_to_hide_by_clock,
    )
    if stay is None or tokens is None or clock is None:
        return ABSENT, ABSENT, ABSENT
    return (
        f"{row.num_streamed_blocks} of {row.num_streamed_blocks + stay}"
        + (f" ({row.num_disk_blocks} on the disk)" if row.num_disk_blocks else ""),
        f"{row.weights_host_bytes / 1e9:.2f}",
        f"{tokens:,.0f} ({clock:,.0f} by the clock)",
    )


def _number(count: int | None) -> str:
    return ABSENT if count is None else str(count or "none")


def _gb(nbytes: int | None) -> str:
    return cell(nbytes, ".2f", 1e9)


def _length(row: EstimateRow) -> str:
    if row.longest_sequence is None:
        return ABSENT
    if not row.longest_sequence:
        return "none"
    return f"{row.longest_sequence:,}" + (
        " (all positions)" if row.is_length_limited_by_positions else ""
    )


def _cause(row: EstimateRow) -> str:
    recomputed = ""
    if row.recomputed_modules:
        recomputed = f" Recomputed: {', '.join(row.recomputed_modules)}."
    return (
        f"{row.method}: the peak is set by {row.peak_tensor} "
        f"({row.peak_tensor_bytes / 1e9:.2f} GB), in {place_of(row.peak_phase, row.peak_where)}; "
        f"without it, it would be {row.next_peak_bytes / 1e9:.2f} GB.{recomputed}"
    )


def _inside(rows: Sequence[EstimateRow]) -> list[str]:
    """Say what the largest workspaces are made of, and what the optimizer's step takes."""
    methods: dict[str, list[str]] = {}
    for row in rows:
        if row.workspace_parts:
            parts = ", ".join(f"{n} {b / 1e9:.3f} GB" for n, b in row.workspace_parts.items())
            said = f"{row.workspace_of} allocates inside, at micro-batch {row.micro_batch}: {parts}"
            methods.setdefault(said, []).append(row.method)
        if row.optimizer_step_bytes > row.peak_bytes:
            said = f"the optimizer's step takes {row.optimizer_step_bytes / 1e9:.2f} GB"
            methods.setdefault(said, []).append(row.method)
    return [
        f"{'all rows' if len(of) == len(rows) else ', '.join(of)}: {said}."
        for said, of in methods.items()
    ]


def _limit(report: EstimateReport) -> list[str]:
    """Say what of the card a step may take, and what the rest is for."""
    if not report.limit_bytes:
        return []
    aside = ", ".join(f"{each['nbytes'] / 1e9:.2f} GB {each['name']}" for each in report.memory)
    return [f"a step may take {report.limit_bytes / 1e9:.2f} GB of the card; set aside: {aside}"]
