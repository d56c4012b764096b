"""``MicroBatchReport``: which micro-batch, length or depth was chosen, among which, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_pyao.plan.documents.provenance import Provenance
from hf_pyao.plan.documents.schema import JsonDocument, ReportError
from hf_pyao.text import echo

SCHEMA_VERSION = 1
"""Version of the JSON of a :class:`MicroBatchReport`."""

KIND = "microbatch"

SEQUENCE = "sequence"
"""Value of :attr:`MicroBatchReport.find` where lengths were looked at."""

MODEL_SIZE = "model-size"
"""Value of :attr:`MicroBatchReport.find` where numbers of layers were looked at."""

FINDS = ("fastest", "largest", SEQUENCE, MODEL_SIZE)
"""Values of :attr:`MicroBatchReport.find`."""

MOST_SAMPLES = 2**40
"""More samples, or tokens of one, than any step has."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchRow:
    """One size that was looked at, with the best plan for it.

    Raises:
        ReportError: a figure is out of range, or a size that fits has no time.
    """

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
    fits_if_expandable: bool = False
    """It does not fit, and would with ``expandable_segments:True``."""
    step_ms: float | None = None
    """Forward and backward of the micro-batch; None where no plan fits."""
    plan: str
    """What becomes of saved tensors, in a few words."""

    def __post_init__(self) -> None:
        """Check the figures."""
        for name in ("micro_batch", "sequence_length", "accumulation", "num_layers"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MOST_SAMPLES:
                raise ReportError(
                    f"a row has {name} {echo(value)}; expected 1 to {MOST_SAMPLES:,}.",
                    key="file-damaged",
                )
        for name in ("peak_bytes", "reserved_bytes", "step_ms"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ReportError(
                    f"the row of micro-batch {self.micro_batch} has {name} {echo(value)}; expected "
                    "0 or more.",
                    key="file-damaged",
                )
        if self.fits and self.step_ms is None:
            raise ReportError(
                f"the row of micro-batch {self.micro_batch} fits, and has no step_ms: the file is "
                "damaged.",
                key="file-damaged",
            )

    @property
    def sample_ms(self) -> float | None:
        """Time for each sample; None where no plan fits."""
        return None if self.step_ms is None else self.step_ms / self.micro_batch


@dataclass(frozen=True, kw_only=True)
class MicroBatchReport(JsonDocument):
    """The micro-batch, the length or the depth for one model on one card: predicted.

    Raises:
        ReportError: ``find`` is another word, or the limit is negative.
    """

    schema_version: int = SCHEMA_VERSION
    kind: str = KIND
    title: str
    find: str
    """One of :data:`FINDS`."""
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

    def __post_init__(self) -> None:
        """Check what rows cannot say."""
        if self.find not in FINDS:
            raise ReportError(
                f"find is {echo(self.find)}; expected one of {', '.join(FINDS)}.",
                key="file-damaged",
            )
        if self.limit_bytes < 0:
            raise ReportError(
                f"limit_bytes is {echo(self.limit_bytes)}; expected 0 or more.", key="file-damaged"
            )
