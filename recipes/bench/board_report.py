"""``BoardReport``: the board as a document, and what its page shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_pyao.plan.documents.bench import OK, REFERENCE, BenchRow
from hf_pyao.plan.documents.provenance import Provenance
from hf_pyao.plan.documents.schema import JsonDocument
from hf_pyao.plan.documents.sweep import Spread
from hf_pyao.quantities import ABSENT, number
from hf_pyao.tools.report.views.view import Table, View

SCHEMA_VERSION = 1
"""Version of the JSON of a :class:`BoardReport`."""

KIND = "board"
MIB = 2**20

ON_A_CPU = (
    "There was no device. Bytes are counted as torch allocates them; those that stand for the "
    "host's are not among them. Times say nothing about a GPU: copies take the time of compute."
)

SUMMARY = (
    "Every method on the same model, data and seed, each in a process of its own, in several "
    "rounds of shuffled order. The memory of a step is the most that is allocated during a "
    "forward and its backward above what was allocated before: saved tensors, logits, gradients "
    "and what is computed meanwhile. Gradients are compared with those of 'none'."
)


@dataclass(frozen=True, kw_only=True)
class BoardEntry:
    """One method in one round, in a process of its own."""

    round: int
    """From 0."""
    position: int
    """When it ran in its round, from 0: the order is shuffled anew for each."""
    row: BenchRow


@dataclass(frozen=True, kw_only=True)
class BoardRow:
    """One method over its rounds. What was not measured is None."""

    method: str
    label: str
    status: str
    """:data:`~hf_pyao.plan.documents.bench.OK` if it was measured in any round."""
    reason: str
    """Why a round of it was not measured."""
    gradients: str
    """How its gradients compare with the reference's, in words."""
    step_peak_bytes: Spread | None = None
    """Most bytes allocated during a step, above those before it."""
    step_ms: Spread | None = None
    """Medians of its rounds."""
    device_weight_bytes: int | None = None
    """Weights on the device, where the step is another algorithm's."""


@dataclass(frozen=True, kw_only=True)
class BoardReport(JsonDocument):
    """Methods compared on one machine, model and seed, in several rounds."""

    schema_version: int = SCHEMA_VERSION
    kind: str = KIND
    title: str
    setup: dict[str, Any]
    """Model, shapes, dtype, seed: ``hf_pyao.tools.bench.setup.BenchSetup``; number of rounds."""
    device: dict[str, Any]
    """Name, memory and driver of the device."""
    link: dict[str, float | None]
    """Measured copy speeds in GiB/s."""
    provenance: Provenance
    rows: list[BoardRow]
    """One for each method, in the order in which they were asked for."""
    entries: list[BoardEntry]
    """In the order in which they ran."""
    is_complete: bool = True
    """False if an interrupt ended the board early."""


def rows_of(entries: Sequence[BoardEntry], methods: Sequence[str]) -> list[BoardRow]:
    """Summarise *entries*: a row for each of *methods* that ran, in that order."""
    found = []
    for method in methods:
        rows = [entry.row for entry in entries if entry.row.method == method]
        if rows:
            found.append(_row_of(rows))
    return found


def _row_of(rows: Sequence[BenchRow]) -> BoardRow:
    measured = [row for row in rows if row.status == OK]
    reason = next((row.reason for row in rows if row.reason), "")
    times = [row.step.median_ms for row in measured if row.step is not None]
    return BoardRow(
        method=rows[0].method,
        label=rows[0].label,
        status=OK if measured else rows[0].status,
        reason=reason,
        gradients=_gradients(measured),
        step_peak_bytes=Spread.of(row.step_peak_bytes for row in measured),
        step_ms=Spread.of(times),
        device_weight_bytes=measured[0].device_weight_bytes if measured else None,
    )


def _gradients(rows: Sequence[BenchRow]) -> str:
    """Return how the gradients of a method's rounds compare with the reference's."""
    if not rows:
        return ""
    if rows[0].method == REFERENCE:
        return "reference"
    if rows[0].algorithm:
        return f"none: {rows[0].algorithm}"
    errors = [row.gradient_error for row in rows if row.gradient_error is not None]
    if not errors:
        return "not compared"
    worst = max(errors)
    return "equal bits" if worst == 0.0 else f"differ by {worst:.1g}"


def board_view(report: BoardReport) -> View:
    """Return a row for each method that ran, the others with their reasons beneath."""
    measured = [row for row in report.rows if row.status == OK]
    device = str(report.device.get("name"))
    return View(
        title=report.title,
        summary=SUMMARY,
        tables=[board_table(report, sorted(measured, key=_order))],
        notes=[
            *(
                f"{row.method}: {row.status}. {row.reason}."
                for row in report.rows
                if row.status != OK
            ),
            *(
                f"{row.method}: another algorithm, whose step is no forward and backward and has "
                f"no gradients. Weights on the device: {row.device_weight_bytes / MIB:,.1f} MiB."
                for row in measured
                if row.device_weight_bytes is not None
            ),
            *([] if report.device.get("memory_gib") else [ON_A_CPU]),
        ],
        legend="Methods: " + "; ".join(f"{row.method}: {row.label}" for row in report.rows) + ".",
        provenance=report.provenance,
        measured_on=[device, f"rounds: {report.setup.get('num_rounds')}; mean, least and most"],
    )


def board_table(report: BoardReport, rows: list[BoardRow]) -> Table:
    """Return a table of *rows*: gradients, memory and time, against the reference."""
    base = next((row for row in report.rows if row.method == REFERENCE), None)
    memory, time = (base.step_peak_bytes, base.step_ms) if base else (None, None)
    lines = [
        [
            row.method,
            row.gradients,
            _memory(row.step_peak_bytes),
            _ratio(row.step_peak_bytes, memory),
            _times(row.step_ms),
            _ratio(row.step_ms, time),
        ]
        for row in rows
    ]
    header = ["method", "gradients", "memory of a step, MiB", "of none", "step, ms", "of none"]
    return Table(header, lines, num_text_columns=2)


def _order(row: BoardRow) -> tuple[bool, float]:
    """The reference comes first, then whatever needs the least memory."""
    memory = row.step_peak_bytes
    return row.method != REFERENCE, float("inf") if memory is None else memory.mean


def _memory(memory: Spread | None) -> str:
    if memory is None:
        return ABSENT
    least, most = (f"{value / MIB:,.1f}" for value in (memory.least, memory.most))
    return least if least == most else f"{least}–{most}"


def _times(time: Spread | None) -> str:
    if time is None:
        return ABSENT
    if time.num_figures == 1:
        return number(time.mean)
    return f"{number(time.mean)} ({number(time.least)}–{number(time.most)})"


def _ratio(figure: Spread | None, base: Spread | None) -> str:
    if figure is None or base is None or not base.mean:
        return ABSENT
    return f"{figure.mean / base.mean:.2f}×"
