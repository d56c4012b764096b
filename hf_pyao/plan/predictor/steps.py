"""A step at any size, by as few recordings as will do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from hf_pyao.levers import Levers
from hf_pyao.plan.predict.optimizer_step import gradients_of
from hf_pyao.plan.step.scaling import OtherOperationsError, interpolate
from hf_pyao.plan.step.step_program import StepProgram


class Steps:
    """A step as a function of one size, and of its levers.

    Args:
        record: records the step at a size, with certain levers.
        points: sizes at which it is recorded; what is below them is recorded where it is wanted,
            since a single sample may run other operations. None: each size is recorded. So is each
            with a loss in chunks, of which there are as many as there are tokens for, and with MLPs
            in tiles.
    """

    def __init__(
        self,
        record: Callable[[int, Levers], StepProgram],
        points: Sequence[int] | None = (2, 3),
    ) -> None:
        self._record = record
        self._points = points
        self._recorded: dict[tuple[int, Levers], StepProgram] = {}
        self._lines: dict[Levers, Callable[[int], StepProgram] | None] = {}

    @property
    def num_recordings(self) -> int:
        """Steps that were recorded."""
        return len(self._recorded)

    def at(self, size: int, levers: Levers) -> StepProgram:
        """Return the step at *size* with *levers*."""
        if (size, levers) not in self._recorded and size > min(self._points or (size,)):
            line = self._line(levers)
            if line is not None:
                return line(size)
        return self._at(size, levers)

    def is_computed(self, levers: Levers) -> bool:
        """Say whether sizes beyond the points are computed."""
        return self._line(levers) is not None

    def _line(self, levers: Levers) -> Callable[[int], StepProgram] | None:
        points = self._points if levers.scales else None
        if points is None:
            return None
        if levers not in self._lines:
            try:
                self._lines[levers] = interpolate([(n, self._at(n, levers)) for n in points])
            except OtherOperationsError:
                self._lines[levers] = None
        return self._lines[levers]

    def _at(self, size: int, levers: Levers) -> StepProgram:
        if (size, levers) not in self._recorded:
            self._recorded[size, levers] = self._record(size, levers)
        return self._recorded[size, levers]


def gradients_held(program: StepProgram) -> StepProgram:
    """Return *program* as it runs behind another micro-batch of the same optimizer step.

    The parameters' gradients are there from the start, and what backward makes of them is added
    and let go.
    """
    gradients, end = gradients_of(program), program.num_operations
    held_bytes = sum(program.buffers[number].nbytes for number in gradients)
    buffers = tuple(
        buffer._replace(death=min(buffer.birth + 1, end)) if number in gradients else buffer
        for number, buffer in enumerate(program.buffers)
    )
    return dataclasses.replace(
        program,
        buffers=buffers,
        resident_bytes=program.resident_bytes + held_bytes,
        holds_gradients=True,
    )
