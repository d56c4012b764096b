"""``BoardReport``: methods of saving memory side by side, each measured in several rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_pyao.plan.documents.bench import OK, REFERENCE, BenchRow, compare
from hf_pyao.plan.documents.provenance import Provenance
from hf_pyao.plan.documents.schema import JsonDocument
from hf_pyao.plan.documents.sweep import Spread

SCHEMA_VERSION = 1
"""Version of the JSON of a :class:`BoardReport`."""

KIND = "board"


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

    def row_of(self, method: str) -> BoardRow | None:
        """Return the row of *method*; None if there is none."""
        return next((row for row in self.rows if row.method == method), None)


def rows_of(entries: Sequence[BoardEntry], methods: Sequence[str]) -> list[BoardRow]:
    """Summarise *entries*: a row for each of *methods* that ran, in that order."""
    by_round: dict[int, list[BenchRow]] = {}
    for entry in entries:
        by_round.setdefault(entry.round, []).append(entry.row)
    compared = [row for rows in by_round.values() for row in compare(rows)]
    found = []
    for method in methods:
        rows = [row for row in compared if row.method == method]
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
    if all(row.are_gradients_equal for row in rows):
        return "equal bits"
    errors = [row.gradient_error for row in rows if row.gradient_error is not None]
    if not errors:
        return "not compared"
    worst = max(errors)
    return "equal bits" if worst == 0.0 else f"differ by {worst:.1g}"


def ratio(figure: Spread | None, base: Spread | None) -> float | None:
    """Return the mean of *figure* over that of *base*; None where there is none."""
    if figure is None or base is None or not base.mean:
        return None
    return figure.mean / base.mean
