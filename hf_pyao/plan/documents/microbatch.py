"""``MicroBatchReport``: which micro-batch, length or depth was chosen, among which, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_pyao.plan.documents.provenance import Provenance
from hf_pyao.plan.documents.schema import JsonDocument

SEQUENCE = "sequence"
"""Value of :attr:`MicroBatchReport.find` where lengths were looked at."""

MODEL_SIZE = "model-size"
"""Value of :attr:`MicroBatchReport.find` where numbers of layers were looked at."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchRow:
    """One size that was looked at, with the best plan for it."""

    micro_batch: int
    sequence_length: int
    """Tokens of a sample."""
    accumulation: int | None = None
    """Micro-batches for one optimizer step; None where lengths or layers were looked at."""
    num_layers: int | None = None
    """Layers of the model; None where they are those that it has."""
    fits: bool
    peak_bytes: int
    """Most that is allocated at once under the plan; where none fits, under the one with the
    lowest peak."""
    reserved_bytes: int | None = None
    """What the device's allocator reserves; None where that was not looked at."""
    host_bytes: int | None = None
    """Most on the host: what is offloaded, and masters of streamed weights; None where that was not
    looked at."""
    fits_if_expandable: bool = False
    """It does not fit, and would with ``expandable_segments:True``."""
    step_ms: float | None = None
    """Forward and backward of the micro-batch; None where no plan fits."""
    plan: str
    """What becomes of saved tensors, in a few words."""

    @property
    def sample_ms(self) -> float | None:
        """Time for each sample; None where no plan fits."""
        if self.step_ms is None or not self.micro_batch:
            return None
        return self.step_ms / self.micro_batch


@dataclass(frozen=True, kw_only=True)
class MicroBatchReport(JsonDocument):
    """The micro-batch, the length or the depth for one model on one card: predicted."""

    schema_version: int = 1
    kind: str = "microbatch"
    title: str
    find: str
    """``"fastest"``, ``"largest"``, :data:`SEQUENCE` or :data:`MODEL_SIZE`."""
    global_batch: int | None = None
    """Samples of one optimizer step on one device; None where lengths or layers were looked at."""
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
