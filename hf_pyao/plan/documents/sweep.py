"""``SweepReport``: memory, throughput and pack time over budgets of offloading, and their knee."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_pyao.plan.documents.bench import OK
from hf_pyao.plan.documents.provenance import Provenance
from hf_pyao.plan.documents.schema import JsonDocument

TENSORS = "tensors"
BYTES = "bytes"
"""What a budget counts."""

KNEE = (
    "The knee is the budget farthest above the straight line from the least memory to the best "
    "throughput (Kneedle), of those that no other beats in both; it counts where it stands out of "
    "the noise."
)
"""How the knee is found."""


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One budget with one seed, in a process of its own. What was not measured is None."""

    budget: int
    """Tensors or bytes that may leave the device in each forward."""
    seed: int | None = None
    """Of weights, data and dropout; None for a prediction."""
    position: int
    """When it ran among those of its seed, from 0."""
    status: str = OK
    """One of :data:`~hf_pyao.plan.documents.bench.STATUSES`."""
    reason: str = ""
    """Why the status is what it is."""
    memory_bytes: int | None = None
    """What :attr:`SweepReport.memory_is` says."""
    host_bytes: int | None = None
    """Measured: most resident host memory above what the process had before its first step.
    Predicted: activations on the host at once."""
    offloaded_bytes: int | None = None
    """What leaves the device in a step."""
    step_ms: float | None = None
    """Median of the timed steps, each a forward and its backward."""
    tokens_per_s: float | None = None
    pack_ms: float | None = None
    """Host time that pack hooks take in a step, mean over the timed steps."""
    stall_ms: float | None = None
    """How long compute waits for copies in a step."""
    loss: float | None = None
    """Of a step whose gradients are compared: the seed set anew, deterministic kernels."""
    gradient_digest: str | None = None
    """Digest of all bits of all its gradients."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Figures of several seeds."""

    mean: float
    standard_deviation: float
    """Of the sample; 0 for a single figure."""
    least: float
    most: float
    num_figures: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Summarise what there is of *values*; None if there is nothing."""
        known = [float(value) for value in values if value is not None]
        if not known:
            return None
        return cls(
            mean=statistics.fmean(known),
            standard_deviation=statistics.stdev(known) if len(known) > 1 else 0.0,
            least=min(known),
            most=max(known),
            num_figures=len(known),
        )


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One budget over its seeds; the second run of budget 0 counts as one more figure."""

    budget: int
    status: str = OK
    """:data:`~hf_pyao.plan.documents.bench.OK` if any of its points was measured."""
    reason: str = ""
    """Why a point of it was not."""
    memory_bytes: Spread | None = None
    host_bytes: Spread | None = None
    offloaded_bytes: int | None = None
    """Most of its points."""
    step_ms: Spread | None = None
    tokens_per_s: Spread | None = None
    pack_ms: Spread | None = None
    stall_ms: Spread | None = None


@dataclass(frozen=True, kw_only=True)
class SweepReport(JsonDocument):
    """Budgets of one model on one machine, measured or predicted."""

    schema_version: int = 1
    kind: str = "sweep"
    title: str
    is_measured: bool
    """False: computed by the predictor; no model ran."""
    budgets_are: str
    """:data:`TENSORS` or :data:`BYTES`."""
    memory_is: str
    """What the points' memory is, in words."""
    setup: dict[str, Any]
    """Model, shapes, seeds, checkpointing, and the seed that shuffles the order."""
    device: dict[str, Any]
    """The machine's device, or the speeds that were assumed of one."""
    assumptions: list[str]
    """Of a prediction."""
    num_planned: int
    """Points that were asked for."""
    rows: list[SweepRow]
    """By budget."""
    points: list[SweepPoint]
    """In the order in which they ran."""
    are_losses_equal: bool | None = None
    """Whether all points of each seed have the same loss, to the bit; None: nothing to compare."""
    are_gradients_equal: bool | None = None
    noise_tokens_per_s: float | None = None
    """Twice the standard deviation of the throughput at one budget, all budgets pooled."""
    drift: list[float]
    """For each seed, throughput of the last point over that of the first, less 1: both have budget
    0, so that it is the machine's noise."""
    knee: int | None = None
    """The budget at the knee; None if there is none."""
    knee_reason: str
    """Why that one, or why none."""
    provenance: Provenance


def rows_of(points: Sequence[SweepPoint]) -> list[SweepRow]:
    """Return the rows of *points*, by budget."""
    by_budget: dict[int, list[SweepPoint]] = {}
    for point in points:
        by_budget.setdefault(point.budget, []).append(point)
    return [_row(budget, by_budget[budget]) for budget in sorted(by_budget)]


def _row(budget: int, points: Sequence[SweepPoint]) -> SweepRow:
    measured = [point for point in points if point.status == OK]
    failed = [point for point in points if point.status != OK]
    count = f" ({len(failed)} of {len(points)})" if failed and len(points) > 1 else ""
    return SweepRow(
        budget=budget,
        status=OK if measured else points[0].status,
        reason=f"{failed[0].status}{count}: {failed[0].reason}" if failed else "",
        memory_bytes=Spread.of(point.memory_bytes for point in measured),
        host_bytes=Spread.of(point.host_bytes for point in measured),
        offloaded_bytes=_most(point.offloaded_bytes for point in measured),
        step_ms=Spread.of(point.step_ms for point in measured),
        tokens_per_s=Spread.of(point.tokens_per_s for point in measured),
        pack_ms=Spread.of(point.pack_ms for point in measured),
        stall_ms=Spread.of(point.stall_ms for point in measured),
    )


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def equality_of(points: Sequence[SweepPoint]) -> tuple[bool | None, bool | None]:
    """Return whether losses, and gradients, are the same in all points of each seed."""
    compared = [point for point in points if point.gradient_digest is not None]
    by_seed: dict[int | None, list[SweepPoint]] = {}
    for point in compared:
        by_seed.setdefault(point.seed, []).append(point)
    several = [group for group in by_seed.values() if len(group) > 1]
    if not several:
        return None, None
    return (
        all(len({point.loss for point in group}) == 1 for group in several),
        all(len({point.gradient_digest for point in group}) == 1 for group in several),
    )


def drift_of(points: Sequence[SweepPoint]) -> list[float]:
    """Return for each seed how the last run of budget 0 differs from the first, as a share."""
    found = []
    for seed in dict.fromkeys(point.seed for point in points):
        speeds = [
            point.tokens_per_s
            for point in points
            if point.seed == seed and point.budget == 0 and point.tokens_per_s
        ]
        if len(speeds) > 1:
            found.append(speeds[-1] / speeds[0] - 1)
    return found


def noise_of(rows: Sequence[SweepRow]) -> float | None:
    """Return twice the standard deviation of throughput at one budget, all budgets pooled.

    None where no budget has several figures.
    """
    spreads = [row.tokens_per_s for row in rows if row.tokens_per_s is not None]
    several = [spread for spread in spreads if spread.num_figures > 1]
    if not several:
        return None
    freedom = sum(spread.num_figures - 1 for spread in several)
    total = sum(s.standard_deviation**2 * (s.num_figures - 1) for s in several)
    return float(2 * (total / freedom) ** 0.5)
