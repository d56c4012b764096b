"""``StepReport``: one training step over time: memory on the device, compute, copies, stalls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hf_pyao.errors import unknown_name
from hf_pyao.plan.documents.provenance import Provenance
from hf_pyao.plan.documents.schema import JsonDocument, ReportError, check_version, read_fields
from hf_pyao.text import echo

SCHEMA_VERSION = 1
"""Version of the JSON of a :class:`StepReport`."""

KIND = "step"

LANES = ("forward", "backward", "outside", "stall", "offload", "reload", "overhead")
"""What a step consists of: compute in layers and outside of them, compute that waits, copies, and
what the engine does beside, where that was measured."""

OUTSIDE = "outside of layers"
"""Where embeddings, head and loss are."""

COMPUTE_LANES = ("forward", "backward", "outside")
"""One of them runs at a time."""

MOST_SPANS = 100_000
"""Most spans, and most points of memory, that a report may have."""


def place_of(phase: str, where: str) -> str:
    """Say where in a step a peak is: ``"backward of model.layers.3"``.

    Args:
        phase: forward or backward.
        where: the layer, or :data:`OUTSIDE`.
    """
    if where == OUTSIDE:
        return f"{phase}, {where} (embeddings, head, loss)"
    return f"{phase} of {where}"


@dataclass(frozen=True, kw_only=True)
class StepSpan:
    """Something that runs."""

    lane: str
    """One of :data:`LANES`."""
    label: str
    """The layer, or the slot that is copied or waited for."""
    start_ms: float
    """Since the step began."""
    end_ms: float


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """Bytes on the device from a moment on, until that of the next point."""

    time_ms: float
    """Since the step began."""
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class StepPeak:
    """The most that is on the device at once, and what sets it."""

    time_ms: float
    nbytes: int
    phase: str
    """``"forward"`` or ``"backward"``."""
    where: str
    """The layer; ``"outside of layers"`` for embeddings, head and loss."""
    tensor: str
    """The tensor without which the peak would be lowest."""
    tensor_bytes: int
    next_peak_bytes: int
    """The peak without it."""

    @property
    def place(self) -> str:
        """Phase and layer, in words."""
        joined = " of " if self.where != OUTSIDE else ", "
        return f"{self.phase}{joined}{self.where}"


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Sums over the step. What is not known is None."""

    step_ms: float
    """Until compute is done."""
    compute_ms: float | None = None
    """The same without waiting for copies."""
    stall_forward_ms: float | None = None
    stall_backward_ms: float | None = None
    offloaded_bytes: int | None = None
    """What crosses the link to the host."""
    read_in_place_bytes: int | None = None
    """What had not left when backward asked for it, and did not come back."""
    host_peak_bytes: int | None = None
    """Most bytes on the host."""
    late_peak_bytes: int | None = None
    """Most on the device if every copy is as late as it can be: a bound for every link."""


@dataclass(frozen=True, kw_only=True)
class StepReport(JsonDocument):
    """One step of a training, predicted or measured."""

    called: ClassVar[str] = "the step"
    schema_version: int = SCHEMA_VERSION
    kind: str = KIND
    title: str
    is_measured: bool
    setup: dict[str, Any] = field(default_factory=dict)
    """Model, sizes, and the way that it is trained."""
    device: str
    """Name of the device or of its preset."""
    memory: list[MemoryPoint] = field(default_factory=list)
    """In order of time; empty if it is not known."""
    limit_bytes: int | None = None
    """What the device can hold; None if it is not known."""
    peak: StepPeak | None = None
    spans: list[StepSpan]
    totals: StepTotals
    provenance: Provenance

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "the step") -> StepReport:
        """Read plain values.

        Raises:
            ReportError: another schema version, an unknown or missing key, or a value of another
                type, each by name; an unknown lane, a time before the step, a span that ends
                before it starts, memory that is not in order; more than :data:`MOST_SPANS` spans.
        """
        check_version(values, cls, SCHEMA_VERSION, where)
        for key in ("spans", "memory"):
            _check_length(values.get(key), f"{where}, {key}")
        report = read_fields(cls, values, where)
        _check_spans(report.spans, where)
        _check_memory(report.memory, where)
        if not report.totals.step_ms >= 0:
            raise ReportError(
                f"{where}, totals, step_ms is {report.totals.step_ms}; expected 0 or more.",
                key="file-damaged",
            )
        return report

    @property
    def end_ms(self) -> float:
        """When the last of all ends: compute, or a copy."""
        ends = (span.end_ms for span in self.spans)
        points = (point.time_ms for point in self.memory[-1:])
        return max([self.totals.step_ms, *ends, *points])


def _check_length(items: object, where: str) -> None:
    if isinstance(items, list) and len(items) > MOST_SPANS:
        raise ReportError(
            f"{where} has {len(items):,} entries; expected {MOST_SPANS:,} at most. Write one step, "
            "by layers and not by operations.",
            key="file-damaged",
        )


def _check_spans(spans: Sequence[StepSpan], where: str) -> None:
    for index, span in enumerate(spans):
        if span.lane not in LANES:
            error = unknown_name("lane", span.lane, LANES)
            raise ReportError(f"{where}, spans[{index}]: {error}", key="file-damaged")
        if not 0 <= span.start_ms <= span.end_ms:
            raise ReportError(
                f"{where}, spans[{index}] ({echo(span.label)}) is from {span.start_ms} to "
                f"{span.end_ms} ms; expected times from 0 on, and an end after the start.",
                key="file-damaged",
            )


def _check_memory(memory: Sequence[MemoryPoint], where: str) -> None:
    before_ms = 0.0
    for index, point in enumerate(memory):
        if point.time_ms < before_ms:
            raise ReportError(
                f"{where}, memory[{index}] is at {point.time_ms} ms, and the one before at "
                f"{before_ms}; expected points in order of time, from 0 on.",
                key="file-damaged",
            )
        before_ms = point.time_ms
        if point.nbytes < 0:
            raise ReportError(
                f"{where}, memory[{index}] has {point.nbytes} bytes; expected none below 0.",
                key="file-damaged",
            )
