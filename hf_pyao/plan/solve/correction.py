"""Corrections to predicted times, from measurements of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hf_pyao.plan.hardware.speeds import LinkModel
from hf_pyao.plan.step.collectives import without_collectives
from hf_pyao.plan.step.planned_step import PlannedStep
from hf_pyao.plan.step.prediction import Prediction
from hf_pyao.plan.step.step_program import BACKWARD, OUTSIDE, StepProgram


@dataclass(frozen=True, kw_only=True)
class Correction:
    """By how much times differ from those of a profile. All are factors."""

    compute: float = 1.0
    """Of what the step's own operations take."""
    backward: float = 1.0
    """Of what those of backward take, besides."""
    rebuild: float = 1.0
    """Of what operations take that run again to rebuild something, besides."""
    copies: float = 1.0
    """Of what copies take."""
    host: float = 1.0
    """Of what a step costs the host."""

    def times(self, other: Correction) -> Correction:
        """Return both, one after the other."""
        return Correction(
            compute=self.compute * other.compute,
            backward=self.backward * other.backward,
            rebuild=self.rebuild * other.rebuild,
            copies=self.copies * other.copies,
            host=self.host * other.host,
        )

    def times_ms(self, program: StepProgram, times_ms: Sequence[float]) -> list[float]:
        """Return what each operation of *program* takes, in ms."""
        turn = _span_of_layers(program)[1]
        in_backward = self.compute * self.backward
        return [
            elapsed_ms
            if operation.collective is not None
            else elapsed_ms * (self.compute if number < turn else in_backward)
            for number, (elapsed_ms, operation) in enumerate(
                zip(times_ms, program.operations, strict=True)
            )
        ]

    def link(self, link: LinkModel) -> LinkModel:
        """Return *link* as slow as copies are."""
        return dataclasses.replace(
            link,
            d2h_gib_per_s=link.d2h_gib_per_s / self.copies,
            h2d_gib_per_s=link.h2d_gib_per_s / self.copies,
        )

    def figures(self) -> dict[str, float]:
        """Return the factors that change something, as a plan holds them."""
        plain = dataclasses.asdict(self)
        return {f"correction/{name}": value for name, value in plain.items() if value != 1.0}


NO_CORRECTION = Correction()
"""Times are those of the profile."""


@dataclass(frozen=True, kw_only=True)
class ExpectedTimes:
    """What is predicted from the first layer's forward to the end of its backward, in ms.

    The head and the loss lie in between; the embedding does not.
    """

    forward_ms: float
    """Compute until the first backward of a layer, head and loss included, and what it waits for
    collectives and the host."""
    backward_ms: float
    """The same after it, without what is rebuilt."""
    rebuild_ms: float
    """What is rebuilt."""
    stall_ms: float
    """How long compute waits for copies."""
    host_ms: float = 0.0
    """How much of forward and backward is waiting for the host."""

    @property
    def compute_ms(self) -> float:
        """All compute, and waits for collectives."""
        return self.forward_ms + self.backward_ms + self.rebuild_ms

    @property
    def layers_ms(self) -> float:
        """All of it."""
        return self.compute_ms + self.stall_ms

    @classmethod
    def of(cls, step: PlannedStep, timed: Prediction) -> ExpectedTimes:
        """Return it for a step with a plan carried out in it, and its prediction."""
        first, turn, end = _span_of_layers(step.program)
        times_ms = without_collectives(step.times_ms, step.program.operations)
        coding_ms = sum(coded.coding_ms for coded in step.coded.values())
        return cls(
            forward_ms=sum(times_ms[first:turn])
            + coding_ms
            + timed.collective_forward_ms
            + timed.host_forward_ms,
            backward_ms=sum(times_ms[turn:end])
            + coding_ms
            + timed.collective_backward_ms
            + timed.host_backward_ms,
            rebuild_ms=step.rebuild_ms,
            stall_ms=timed.stall_forward_ms + timed.stall_backward_ms,
            host_ms=timed.host_forward_ms + timed.host_backward_ms,
        )

    def figures(self) -> dict[str, float]:
        """Return what a plan holds of it, beside what was measured."""
        return {
            "predicted_layers_ms": self.layers_ms,
            "predicted_compute_ms": self.compute_ms,
            "predicted_stall_ms": self.stall_ms,
        }


def _span_of_layers(program: StepProgram) -> tuple[int, int, int]:
    """Return the layers' first operation, the first of their backward, and where that ends."""
    inside = [segment for segment in program.segments if segment.layer != OUTSIDE]
    if not inside:
        return 0, program.num_operations, program.num_operations
    turn = next((each.start for each in inside if each.phase == BACKWARD), inside[-1].end)
    return inside[0].start, turn, inside[-1].end
