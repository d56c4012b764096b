"""``PredictionReport``: a profiled step under plans, beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from hf_pyao.plan.documents.provenance import Provenance
from hf_pyao.plan.documents.schema import JsonDocument


@dataclass(frozen=True, kw_only=True)
class PredictedPlan:
    """A predicted step under one plan. Sizes are in bytes."""

    name: str
    step_ms: float
    """Forward, loss and backward of the micro-batch."""
    compute_ms: float
    """The same without waiting for copies."""
    stall_forward_ms: float
    stall_backward_ms: float
    peak_bytes: int
    """Most that is allocated at once, with weights and gradients, for copies that are always
    late."""
    reserved_bytes: int | None = None
    """What the device's allocator reserves; None where that was not looked at."""
    peak_where: str
    """Phase and layer of the peak."""
    peak_tensor: str
    """The tensor without which the peak would be lowest."""
    next_peak_bytes: int
    """The peak without it."""
    fits: bool | None = None
    """Whether it fits into the device's memory; None if that was not said."""
    host_bytes: int
    """Activations on the host at once: all of it is pinned where there is a device."""
    offloaded_bytes: int


@dataclass(frozen=True, kw_only=True)
class ComparedFigure:
    """A figure that was measured, and what was predicted for it."""

    name: str
    unit: str
    measured: float
    predicted: float


@dataclass(frozen=True, kw_only=True)
class PredictionReport(JsonDocument):
    """A profiled step under plans: predicted, and as it was measured."""

    called: ClassVar[str] = "the prediction"
    schema_version: int = 1
    kind: str = "prediction"
    title: str
    summary: str
    """What the times and speeds are."""
    profile: dict[str, Any]
    """What the profile is of."""
    plans: list[PredictedPlan]
    compared: list[ComparedFigure] = field(default_factory=list)
    """For the policy under which it was profiled; empty where nothing was measured."""
    notes: list[str] = field(default_factory=list)
    provenance: Provenance
