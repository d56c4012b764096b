"""``MicroBatchReport``: which micro-batch or length was chosen, among which, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_pyao.report.provenance import Provenance
from hf_pyao.report.quantities import ABSENT, GIB, number
from hf_pyao.report.schema import check_version, read_fields, to_plain
from hf_pyao.report.view import Table, View

SCHEMA_VERSION = 1
"""Version of the JSON of a :class:`MicroBatchReport`."""

KIND = "microbatch"

SEQUENCE = "sequence"
"""Value of :attr:`MicroBatchReport.find` where lengths were looked at."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchRow:
    """One size that was looked at, with the best plan for it."""

    micro_batch: int
    sequence_length: int
    """Tokens of a sample."""
    accumulation: int | None = None
    """Micro-batches for one optimizer step; None where lengths were looked at."""
    fits: bool
    peak_bytes: int
    """Most on the device at once under the plan; where none fits, under the one with the lowest
    peak."""
    step_ms: float | None = None
    """Forward and backward of the micro-batch; None where no plan fits."""
    plan: str
    """What becomes of saved tensors, in a few words."""

    @property
    def sample_ms(self) -> float | None:
        """Time for each sample; None where no plan fits."""
        return None if self.step_ms is None else self.step_ms / self.micro_batch


@dataclass(frozen=True, kw_only=True)
class MicroBatchReport:
    """The micro-batch, or the sequence length, for one model on one card: predicted."""

    schema_version: int = SCHEMA_VERSION
    kind: str = KIND
    title: str
    find: str
    """``"fastest"``, ``"largest"`` or ``"sequence"``."""
    global_batch: int | None = None
    """Samples of one optimizer step on one device; None where lengths were looked at."""
    limit_bytes: int
    """Most bytes on the device."""
    chosen: MicroBatchRow | None = None
    """None: nothing fits."""
    verdict: str
    """What was chosen, and why, in words."""
    setup: dict[str, Any]
    hardware: dict[str, Any]
    is_measured: bool = False
    assumptions: list[str]
    provenance: Provenance
    rows: list[MicroBatchRow]
    """By rising size."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "the report") -> MicroBatchReport:
        """Read plain values.

        Raises:
            ReportError: another schema version, an unknown or missing key, or a value of another
                type, each by name.
        """
        check_version(values, cls, SCHEMA_VERSION, where)
        return read_fields(cls, values, where)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON holds them."""
        plain: dict[str, Any] = to_plain(self)
        return plain


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
        "peak, GiB",
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
            ABSENT if row.step_ms is None else number(row.step_ms),
            ABSENT if row.sample_ms is None else number(row.sample_ms),
            row.plan,
        ]
        for row in report.rows
    ]
    return Table(header, rows)
