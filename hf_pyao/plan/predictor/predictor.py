"""The one predictor: what a training comes to, at any size and in any way.

Commands, the choice of a micro-batch and policy ``auto`` ask it alike. They differ in where the
step comes from: a model by its name, a copy of a live model, a profile.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_pyao.levers import Levers, LeversRefusedError, or_refuse
from hf_pyao.plan.hardware.host_model import HostCosts
from hf_pyao.plan.hardware.speeds import DeviceModel, LinkModel
from hf_pyao.plan.options.chosen_levers import ChosenLevers
from hf_pyao.plan.options.lever_choice import LeverChoice
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.predict.calibration import times_like
from hf_pyao.plan.predict.outcome import Outcome
from hf_pyao.plan.predict.predict import operation_times_ms
from hf_pyao.plan.predict.profiled_step import ProfiledStep
from hf_pyao.plan.predictor.way import Way
from hf_pyao.plan.solve.conditions import outcome_of
from hf_pyao.plan.solve.correction import NO_CORRECTION, Correction
from hf_pyao.plan.solve.planner import Planner
from hf_pyao.plan.solve.steering import MEASURED, PRESET
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.plan.weights.choice import StreamingChoice

StepAt = Callable[[int, Levers], StepProgram]
"""The step at a size, with levers. Any error says that it cannot be had with these."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """The speeds that are predicted for."""

    times_ms: Callable[[StepProgram], Sequence[float]]
    """What each operation of a step takes."""
    link: LinkModel
    speed_ratios: tuple[float, ...] = MEASURED
    """As :attr:`~hf_pyao.plan.solve.conditions.Conditions.speed_ratios`."""
    rebuild_factor: float = 1.0
    """Of what operations take that run again to rebuild something."""
    is_blocking: bool = False
    """Compute stands still while copies run."""
    host: HostCosts | None = None
    """What a step costs the host; None: it is never slower than the device."""

    def more(self) -> dict[str, Any]:
        """Return what conditions take of it beside the link."""
        names = ("speed_ratios", "rebuild_factor", "is_blocking", "host")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of(
        cls,
        device: DeviceModel,
        link: LinkModel,
        speed_ratios: tuple[float, ...] = MEASURED,
    ) -> Card:
        """Return a card of these speeds; by default as a run plans for it, which measures first."""

        def times_ms(program: StepProgram) -> Sequence[float]:
            return operation_times_ms(program, device)

        return cls(times_ms=times_ms, link=link, speed_ratios=speed_ratios)


class Predictor:
    """Predicts one training on one card.

    Args:
        step_at: its steps.
        card: where it runs.
        binds: what binds a plan; its levers are those of the step as configured.
        dtypes: of slots, by name, as far as known; codecs take slots of known ones alone.
    """

    def __init__(
        self,
        step_at: StepAt,
        card: Card,
        binds: PlanRequest,
        *,
        dtypes: Mapping[str, str] | None = None,
    ) -> None:
        self._step_at = step_at
        self._card = card
        self.binds = binds
        self._dtypes = dtypes or {}
        self._newest: tuple[int, StreamingChoice] | None = None
        """Of the size that was asked about last: it may be asked for other limits."""

    @classmethod
    def of_profile(
        cls,
        profiled: ProfiledStep,
        binds: PlanRequest,
        record: Callable[[Levers], StepProgram] | None = None,
        *,
        correction: Correction = NO_CORRECTION,
    ) -> Predictor:
        """Return what predicts the step of a profile, which has one size.

        Args:
            profiled: the step.
            binds: what binds a plan.
            record: records the step with other levers; None: it cannot be.
            correction: by how much times differ from the profile's.
        """
        profile, device, own = profiled.profile, profiled.device, profiled.program
        own_ms = correction.times_ms(own, profiled.times_ms)

        def times_ms(program: StepProgram) -> Sequence[float]:
            if program is own:
                return own_ms
            if device is not None:
                return operation_times_ms(program, device)
            return times_like(own_ms, own, program)

        def step_at(_: int, levers: Levers) -> StepProgram:
            if levers == binds.levers:
                return own
            if record is None:
                raise LeversRefusedError("the step cannot be recorded again")
            return record(levers)

        is_measured = profile.speeds is None and not profiled.is_elsewhere
        card = Card(
            times_ms=times_ms,
            link=correction.link(profiled.link),
            speed_ratios=MEASURED if is_measured else PRESET,
            rebuild_factor=correction.rebuild,
            is_blocking=profiled.is_blocking,
            host=profiled.host and profiled.host.scaled(correction.host),
        )
        dtypes = {slot.name: slot.dtype for slot in profile.slots}
        return cls(step_at, card, binds, dtypes=dtypes)

    def at(self, size: int, way: Way) -> Outcome:
        """Return what the step comes to in a way that searches nothing.

        Raises:
            PlanError: the way's plan is not for this step.
        """
        card, binds = self._card, self.binds
        levers = binds.levers if way.levers is None else way.levers
        program = binds.placed(self._step_at(size, levers))
        conditions = dataclasses.replace(binds, levers=levers).conditions(
            program.num_layers, card.link, **card.more()
        )
        return outcome_of(way.carried_out(program, card.times_ms(program), conditions), conditions)

    def planner(self, size: int, levers: Levers) -> Planner:
        """Return what plans the step with *levers*.

        Raises:
            LeversRefusedError: they are others than configured, and cannot be had.
        """
        card = self._card
        if levers == self.binds.levers:
            program = self._step_at(size, levers)
        else:
            program = or_refuse(lambda: self._step_at(size, levers))
        return dataclasses.replace(self.binds, levers=levers).planner_of(
            program,
            card.times_ms(program),
            card.link,
            self._dtypes,
            **card.more(),
        )

    def choice(self, size: int = 1) -> StreamingChoice:
        """Return what chooses a plan: levers and streamed weights among those that are free."""
        if self._newest is None or self._newest[0] != size:
            binds = self.binds
            # Of a copy: what is chosen with is held here, and must not hold this in turn.
            planner = copy.copy(self).planner
            levers = LeverChoice(
                binds.levers,
                planner(size, binds.levers),
                lambda each: planner(size, each),
                binds.room,
            )
            self._newest = size, StreamingChoice(levers, binds.stream_weights)
        return self._newest[1]

    def within(self, size: int, way: Way, limit_bytes: float) -> SizedPlan:
        """Return what *way* comes to where *limit_bytes* may be reserved."""
        if way.policy == "auto":
            return self.best(size, limit_bytes)
        return sized_plan(self.at(size, way), way.name, limit_bytes)

    def best(self, size: int, limit_bytes: float) -> SizedPlan:
        """Return the fastest plan within *limit_bytes*, or else the one with the lowest peak."""
        chosen = self.choice(size).checked().best(limit_bytes).levers
        name = chosen.candidate.name, chosen.levers.described_beside(self.binds.levers)
        return sized_plan(
            chosen.candidate.outcome,
            ", ".join(filter(None, name)),
            limit_bytes,
            fits=chosen.fits,
            chosen=chosen,
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
    host_bytes: int = 0
    """Most on the host, with the masters of streamed weights."""
    fits_if_expandable: bool = False
    """It does not fit, and would with expandable segments."""
    chosen: ChosenLevers | None = None
    """The plan, and with which levers, where it was looked for."""


def sized_plan(
    found: Outcome,
    name: str,
    limit_bytes: float,
    *,
    fits: bool | None = None,
    chosen: ChosenLevers | None = None,
) -> SizedPlan:
    """Return what a plan comes to within a limit.

    Args:
        found: what it comes to.
        name: of what is done.
        limit_bytes: most bytes on the device.
        fits: whether the plan was found to fit; None: the allocator is asked.
        chosen: the plan, where it was looked for.
    """
    memory, program = found.memory, found.step.program
    if num_streamed := len(program.streamed.layers):
        name += f", {num_streamed} of {program.num_layers} layers' weights streamed"
    fits = memory.fits(limit_bytes) if fits is None else fits
    return SizedPlan(
        plan=name,
        step_ms=found.step_ms,
        peak_bytes=memory.peak_bytes,
        reserved_bytes=memory.reserved_within(limit_bytes),
        fits=fits,
        host_bytes=found.host_bytes,
        fits_if_expandable=memory.fits_if_expandable(limit_bytes),
        chosen=chosen,
    )
