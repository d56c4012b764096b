"""A step at any size, and the best plan for it there, for a choice among sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from hf_pyao.levers import Levers
from hf_pyao.plan.hardware.host_model import IN_STEP
from hf_pyao.plan.hardware.speeds import DeviceModel
from hf_pyao.plan.options.chosen_levers import ChosenLevers
from hf_pyao.plan.options.lever_choice import LeverChoice
from hf_pyao.plan.predict.allocator_replay import StepMemory
from hf_pyao.plan.predict.optimizer_step import gradients_of
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.solve.step_problem import Conditions
from hf_pyao.plan.step.scaling import OtherOperationsError, interpolate
from hf_pyao.plan.step.step_program import StepProgram


class SizedSteps:
    """A step as a function of one size, by as few recordings as will do.

    Args:
        record: records the step at a size.
        points: sizes at which it is recorded; what is below them is recorded where it is wanted,
            since a single sample may run other operations.
        scales: True if what the step does at other sizes follows from *points*. A loss in chunks
            has as many of them as there are tokens for, and is recorded at each size; so are MLPs
            in tiles.
    """

    def __init__(
        self,
        record: Callable[[int], StepProgram],
        *,
        points: Sequence[int] = (2, 3),
        scales: bool = True,
    ) -> None:
        self._record = record
        self._points = points
        self._scales = scales
        self._recorded: dict[int, StepProgram] = {}
        self._line: Callable[[int], StepProgram] | None = None
        self.num_recordings = 0

    def __call__(self, size: int) -> StepProgram:
        """Return the step at *size*."""
        if size not in self._recorded and size > min(self._points) and self._scales:
            line = self._interpolated()
            if line is not None:
                return line(size)
        return self._at(size)

    def _interpolated(self) -> Callable[[int], StepProgram] | None:
        if self._line is None:
            try:
                self._line = interpolate([(size, self._at(size)) for size in self._points])
            except OtherOperationsError:
                self._scales = False
        return self._line

    def _at(self, size: int) -> StepProgram:
        if size not in self._recorded:
            self.num_recordings += 1
            self._recorded[size] = self._record(size)
        return self._recorded[size]


class SizedLevers:
    """A step as a function of one size, and of its levers.

    Args:
        make: makes the steps with certain levers.
    """

    def __init__(self, make: Callable[[Levers], SizedSteps]) -> None:
        self._make = make
        self._steps: dict[Levers, SizedSteps] = {}

    def at(self, size: int, levers: Levers) -> StepProgram:
        """Return the step at *size* with *levers*."""
        if levers not in self._steps:
            self._steps[levers] = self._make(levers)
        return self._steps[levers](size)

    @property
    def num_recordings(self) -> int:
        """Steps that were recorded."""
        return sum(each.num_recordings for each in self._steps.values())


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
        program, buffers=buffers, resident_bytes=program.resident_bytes + held_bytes
    )


@dataclass(frozen=True, kw_only=True)
class SizedPlan:
    """The best plan at one size, and what it comes to."""

    plan: str
    """Its name."""
    step_ms: float
    """Of the micro-batch."""
    peak_bytes: int
    """Of what is allocated; where no plan fits, the lowest of all plans."""
    fits: bool
    reserved_bytes: int | None = None
    """What the device's allocator reserves for it, within the limit if it fits."""
    fits_if_expandable: bool = False
    """It does not fit, and would with expandable segments."""
    chosen: ChosenLevers | None = None
    """The plan, and with which levers, where it was looked for."""


def best_plan(choice: LeverChoice, limit_bytes: float) -> SizedPlan:
    """Return the fastest plan within *limit_bytes*, or else the one with the lowest peak."""
    return sized_plan(choice.best(limit_bytes), choice.levers, limit_bytes)


def sized_plan(chosen: ChosenLevers, given: Levers, limit_bytes: float) -> SizedPlan:
    """Return what *chosen* comes to.

    Args:
        chosen: a plan, and with which levers.
        given: the levers as configured.
        limit_bytes: most bytes on the device.
    """
    found = chosen.candidate
    program = found.step.program
    num_streamed = len(program.streamed.layers)
    parts = [found.name, chosen.levers.described_beside(given)]
    if num_streamed:
        parts.append(f"{num_streamed} of {program.num_layers} layers' weights streamed")
    return SizedPlan(
        plan=", ".join(filter(None, parts)),
        step_ms=found.step_ms,
        peak_bytes=found.peak_bytes,
        reserved_bytes=found.memory.reserved_within(limit_bytes),
        fits=chosen.fits,
        fits_if_expandable=found.memory.fits_if_expandable(limit_bytes),
        chosen=chosen,
    )


def fixed_plan(
    program: StepProgram,
    device: DeviceModel,
    conditions: Conditions,
    leaves: Sequence[bool],
    name: str,
    limit_bytes: float,
) -> SizedPlan:
    """Predict *program* for a given set of slots that leave.

    Args:
        program: the step.
        device: its speeds.
        conditions: link, window, and the device's allocator.
        leaves: by slot.
        name: of what is done.
        limit_bytes: most bytes on the device.
    """
    window_bytes = conditions.window_bytes
    predict_timed = partial(
        predict,
        program,
        leaves,
        window_bytes=window_bytes,
        device=device,
        link=conditions.link,
    )
    timed = predict_timed()
    late = predict(program, leaves, window_bytes=window_bytes)
    early = partial(predict_timed, host=IN_STEP)
    memory = StepMemory(program, late, early, conditions.allocator)
    return SizedPlan(
        plan=name,
        step_ms=timed.step_ms,
        peak_bytes=late.peak_bytes,
        reserved_bytes=memory.reserved_within(limit_bytes),
        fits=memory.fits(limit_bytes),
        fits_if_expandable=memory.fits_if_expandable(limit_bytes),
    )
