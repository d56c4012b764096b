"""What an estimate shows: a row for each way to train, the verdict, what sets each peak."""

from __future__ import annotations

from collections.abc import Sequence

from hf_pyao.plan.documents.estimate import EstimateReport, EstimateRow
from hf_pyao.plan.documents.step import place_of
from hf_pyao.quantities import ABSENT
from hf_pyao.tools.report.views.view import Table, View


def estimate_view(report: EstimateReport) -> View:
    """Return one table row for each way to train, the verdict, and what sets each peak."""
    notes = [
        *map(_cause, report.rows),
        *_inside(report.rows),
        *_limit(report),
        *map(_assumed, report.assumptions),
    ]
    return View(
        title=report.title,
        tables=[estimate_table(report)],
        conclusion=report.verdict,
        notes=list(dict.fromkeys(notes)),
        provenance=report.provenance,
    )


def estimate_table(report: EstimateReport) -> Table:
    """Return an estimate's table; columns that no row has a figure for are left out."""
    header = [
        "method",
        "largest micro-batch",
        "with expandable segments",
        "longest sequence",
        "at micro-batch",
        "allocated, GB",
        "inside kernels, GB",
        "reserved, GB",
        "step, ms",
        "tokens/s",
        "copies hidden",
        "host, GB",
        "layers streamed",
        "weights on the host, GB",
        "tokens to hide uploads",
    ]
    rows = [
        [
            row.method,
            str(row.largest_micro_batch) if row.largest_micro_batch else "none",
            _with_expandable_segments(row),
            _length(row),
            str(row.micro_batch),
            f"{row.peak_bytes / 1e9:.2f}" + _too_much(row, row.reserved_bytes is None),
            f"{row.workspace_bytes / 1e9:.2f}" if row.workspace_of else ABSENT,
            ABSENT
            if row.reserved_bytes is None
            else f"{row.reserved_bytes / 1e9:.2f}" + _too_much(row, True),
            f"{row.step_ms:,.1f}",
            f"{row.tokens_per_s:,.0f}",
            ABSENT if row.hidden is None else f"{row.hidden:.0%}",
            f"{row.host_bytes / 1e9:.2f}",
            *_streamed(row),
        ]
        for row in report.rows
    ]
    filled = [column for column in range(len(header)) if any(r[column] != ABSENT for r in rows)]
    return Table([header[c] for c in filled], [[row[c] for c in filled] for row in rows])


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


def _with_expandable_segments(row: EstimateRow) -> str:
    found = row.largest_with_expandable_segments
    if found is None:
        return ABSENT
    return str(found) if found else "none"


def _too_much(row: EstimateRow, is_shown_here: bool) -> str:
    return " (too much)" if is_shown_here and not row.fits else ""


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


def _assumed(text: str) -> str:
    return f"assumed: {text}"
