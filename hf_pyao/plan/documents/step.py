"""``StepReport``: one training step over time: memory on the device, compute, copies, stalls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from hf_pyao.plan.documents.provenance import Provenance
from hf_pyao.plan.documents.schema import JsonDocument

LANES = ("forward", "backward", "outside", "stall", "offload", "reload", "overhead")
"""What a step consists of: compute in layers and outside of them, compute that waits, copies, and
what the engine does beside, where that was measured."""

OUTSIDE = "outside of layers"
"""Where embeddings, head and loss are."""


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
    schema_version: int = 1
    kind: str = "step"
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

    @property
    def end_ms(self) -> float:
        """When the last of all ends: compute, or a copy."""
        ends = (span.end_ms for span in self.spans)
        points = (point.time_ms for point in self.memory[-1:])
        return max([self.totals.step_ms, *ends, *points])
