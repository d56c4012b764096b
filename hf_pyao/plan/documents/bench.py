"""``BenchReport``: what each method of saving memory cost and saved, one row for each."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_pyao.plan.documents.provenance import Provenance
from hf_pyao.plan.documents.schema import JsonDocument

OK = "ok"
UNAVAILABLE = "cannot run here"
OUT_OF_MEMORY = "out of memory"
TIMED_OUT = "timed out"
CRASHED = "crashed"
FAILED = "failed"
NOT_REACHED = "not reached"
STATUSES = (OK, UNAVAILABLE, OUT_OF_MEMORY, TIMED_OUT, CRASHED, FAILED, NOT_REACHED)
"""What became of a row's measurement. Anything but :data:`OK` comes with a reason."""

REFERENCE = "none"
"""The method that losses and gradients are compared with."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Times of the timed steps, each measured on a drained device, in milliseconds."""

    median_ms: float
    lower_quartile_ms: float
    upper_quartile_ms: float
    num_steps: int
    num_warmup: int
    """Steps that ran before, untimed."""
    all_ms: list[float]
    """In the order in which they ran."""

    @classmethod
    def of(cls, times_ms: Sequence[float], num_warmup: int) -> StepTimes:
        """Summarise *times_ms* (at least one)."""
        quartiles = (
            statistics.quantiles(times_ms, n=4, method="inclusive")
            if len(times_ms) > 1
            else [times_ms[0]] * 3
        )
        return cls(
            median_ms=statistics.median(times_ms),
            lower_quartile_ms=quartiles[0],
            upper_quartile_ms=quartiles[2],
            num_steps=len(times_ms),
            num_warmup=num_warmup,
            all_ms=list(times_ms),
        )


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One method at one micro-batch. What was not measured is None. Sizes are in bytes."""

    method: str
    label: str
    """The method, as tables show it."""
    status: str = OK
    """One of :data:`STATUSES`."""
    reason: str = ""
    """Why the status is what it is."""
    micro_batch: int
    """Sequences in a micro-batch; where the largest was looked for, that one (0: none fits)."""
    num_tried: int | None = None
    """Micro-batches tried in the search for the largest; None: it was given."""
    step: StepTimes | None = None
    """One step is a forward and its backward."""
    tokens_per_s: float | None = None
    start_allocated_bytes: int | None = None
    """Device memory before the first step: weights, and what was reserved on purpose."""
    after_forward_bytes: int | None = None
    """Device memory between forward and backward, above the start."""
    peak_allocated_bytes: int | None = None
    """Most device memory in tensors over the timed steps; None on a CPU, which does not count."""
    peak_reserved_bytes: int | None = None
    """Most device memory that the allocator held."""
    peak_rss_bytes: int | None = None
    """Most host memory of the process over all its steps. On a CPU this holds the tensors too."""
    rss_growth_bytes: int | None = None
    """How far that is above the process before the first step."""
    step_peak_bytes: int | None = None
    """Most bytes allocated during a step above those before it; None where it was not counted."""
    pinned_bytes: int | None = None
    """Most page-locked host memory; None without an accelerator."""
    loss: float | None = None
    """Of the compared step: same seed and data for each method, deterministic kernels."""
    gradient_norm: float | None = None
    gradient_digest: str | None = None
    """Digest of all bits of all gradients of the compared step, by parameter."""
    gradient_error: float | None = None
    """Largest relative error of a parameter's gradient, in the Euclidean norm, against that of
    :data:`REFERENCE` in the same process; None where it was not computed."""
    algorithm: str = ""
    """What the step is, where it is no forward and its backward: nothing is compared then."""
    device_weight_bytes: int | None = None
    """Weights on the device over a step of such an algorithm."""
    is_loss_equal: bool | None = None
    """Bit for bit as without any method; None: there is nothing to compare."""
    are_gradients_equal: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """The method's own counters for its last step, where it has some."""
    wall_s: float | None = None
    """All that the row took."""


@dataclass(frozen=True, kw_only=True)
class BenchReport(JsonDocument):
    """Methods compared on one machine, model and seed."""

    schema_version: int = 1
    kind: str = "bench"
    title: str
    setup: dict[str, Any]
    """Model, shapes, dtype, seed, limits: ``hf_pyao.tools.bench.setup.BenchSetup``."""
    device: dict[str, Any]
    """Name, memory and driver of the device."""
    link: dict[str, float | None]
    """Measured copy speeds in GiB/s; see ``hf_pyao.plan.hardware.link_speed.LinkSpeed``."""
    provenance: Provenance
    rows: list[BenchRow]

    @property
    def is_search(self) -> bool:
        """True if the largest micro-batch of each method was looked for."""
        return any(row.num_tried is not None for row in self.rows)

    def row_of(self, method: str) -> BenchRow | None:
        """Return the row of *method*; None if there is none."""
        return next((row for row in self.rows if row.method == method), None)

    def with_rows(self, rows: Sequence[BenchRow]) -> BenchReport:
        """Return the report with *rows*, each compared with the reference."""
        return dataclasses.replace(self, rows=compare(rows))


def compare(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Compare losses and gradients with the reference's, where both were taken alike."""
    reference = next((row for row in rows if row.method == REFERENCE), None)
    compared = []
    for row in rows:
        is_loss_equal = are_gradients_equal = None
        if (
            reference is not None
            and reference.gradient_digest is not None
            and row.gradient_digest is not None
        ):
            is_loss_equal = row.loss == reference.loss
            are_gradients_equal = row.gradient_digest == reference.gradient_digest
        compared.append(
            dataclasses.replace(
                row, is_loss_equal=is_loss_equal, are_gradients_equal=are_gradients_equal
            )
        )
    return compared


@dataclass(frozen=True, kw_only=True)
class FactsReport(JsonDocument):
    """Named facts about a machine or a run: a link's speed, a test run's outcome."""

    schema_version: int = 1
    kind: str = "facts"
    title: str
    facts: dict[str, Any]
    """Name -> figure or text; the name carries the unit."""
    provenance: Provenance
