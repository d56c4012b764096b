"""Collectives among the operations of a step: what they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_pyao.plan.hardware.speeds import GIB
from hf_pyao.plan.step.step_program import Collective, Operation

Exchanged = Callable[[Collective, int], None]
"""Is told of a collective that is queued now, and how many such may run beside compute; 0: compute
waits for this one."""


def with_collectives(
    times_ms: list[float], operations: Sequence[Operation], gib_per_s: float | None
) -> list[float]:
    """Return *times_ms* with those of collectives, at a speed of the interconnect.

    Args:
        times_ms: what each operation takes.
        operations: of the step.
        gib_per_s: that speed; None: it is not known, and collectives take no time.
    """
    return [
        elapsed_ms
        if operation.collective is None
        else collective_ms(operation.collective, gib_per_s)
        for elapsed_ms, operation in zip(times_ms, operations, strict=True)
    ]


def collective_ms(collective: Collective, gib_per_s: float | None) -> float:
    """Return how long a collective takes; 0 where no speed is known."""
    return 0.0 if gib_per_s is None else collective.nbytes / GIB / gib_per_s * 1e3


def without_collectives(
    times_ms: Sequence[float], operations: Sequence[Operation]
) -> Sequence[float]:
    """Return *times_ms* of compute alone: collectives take none of it."""
    if not any(operation.collective for operation in operations):
        return times_ms
    return [
        elapsed_ms if operation.collective is None else 0.0
        for elapsed_ms, operation in zip(times_ms, operations, strict=True)
    ]
