"""A plan of policy ``auto``, and what the next one can be made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hf_pyao.levers import Levers
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.options.chosen_levers import ChosenLevers
from hf_pyao.plan.options.lever_choice import LeverChoice
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.predict.copy_lanes import OFFLOAD, RELOAD
from hf_pyao.plan.predictor.predictor import Predictor
from hf_pyao.plan.solve.correction import NO_CORRECTION, Correction, ExpectedTimes
from hf_pyao.plan.solve.planner import KEEP_ALL, OFFLOAD_ALL, Candidate
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.plan.weights.choice import StreamingChoice

Record = Callable[[Levers], StepProgram]
"""Records the step with other levers; raises LeversRefusedError where it cannot."""


@dataclass(frozen=True)
class Limits:
    """What memory a plan may need."""

    limit_bytes: float
    """For the step, without what lies beside it."""
    device_bytes: int
    """Of the device."""
    beside_bytes: int
    """Of it, taken by other things than the step."""
    how: str
    """Where the limit comes from, in words."""


@dataclass(frozen=True)
class Draft:
    """A plan, and what the next one for the same parameters can be made from."""

    plan: Plan
    profile: Profile
    num_elements: int
    """Of the batch of the step that is planned for."""
    request: PlanRequest
    record: Record
    """Records the step with other levers, each once."""
    limits: Limits
    choice: StreamingChoice
    followed: ChosenLevers
    before: ChosenLevers | None = None
    """What the plan replaced since times were off; None: nothing."""
    correction: Correction = NO_CORRECTION
    growth_exponent: float | None = None
    """By which power of a batch's elements its step's memory grows; None: not known."""
    least_streamed: int = 0
    """Blocks of frozen weights that are streamed at least, since memory ran out."""
    trained: int | None = None
    """Which parameters are trained, as ``PlanFacts.trained``; None: not known."""

    @property
    def chosen(self) -> Candidate:
        """The plan, with its prediction."""
        return self.followed.candidate

    @property
    def keeps_all(self) -> bool:
        """True if the plan is to do nothing."""
        return self.chosen.name == KEEP_ALL and not self.followed.levers.checkpoint_every

    @property
    def fallback(self) -> ChosenLevers | None:
        """Offloading everything of the step as configured, if that fits and is not followed."""
        choice = self.levers_choice
        found = choice.configured.simple().get(OFFLOAD_ALL)
        if found is None or not found.memory.fits(self.limits.limit_bytes):
            return None
        is_it = self.chosen.name == OFFLOAD_ALL and self.followed.levers == self.request.levers
        return None if is_it else choice.as_configured(found)

    @property
    def num_streamed(self) -> int:
        """Blocks of frozen weights that are streamed."""
        return len(self.followed.planner.program.streamed.layers)

    @property
    def levers_choice(self) -> LeverChoice:
        """What chooses with as many blocks streamed as now."""
        return self.choice.with_streamed(self.num_streamed)

    @property
    def copies_ms(self) -> float:
        """What the copies of the plan need on the link, both ways."""
        link, nbytes = self.followed.planner.conditions.link, self.chosen.timed.offloaded_bytes
        return link.copy_ms(OFFLOAD, nbytes) + link.copy_ms(RELOAD, nbytes) if nbytes else 0.0

    def expected(self, correction: Correction = NO_CORRECTION) -> ExpectedTimes:
        """Return what is predicted for the plan, its times corrected further."""
        chosen = self.chosen
        if correction is not NO_CORRECTION:
            choice = self.choice_with(correction).with_streamed(self.num_streamed)
            chosen = choice.planner_for(self.followed.levers).again(chosen)
        return ExpectedTimes.of(chosen.step, chosen.timed)

    def choice_with(self, correction: Correction) -> StreamingChoice:
        """Return the choice for times that are corrected further."""
        correction = self.correction.times(correction)
        return choice_of(self.request, self.profile, self.record, correction)


def choice_of(
    request: PlanRequest, profile: Profile, record: Record, correction: Correction = NO_CORRECTION
) -> StreamingChoice:
    """Return what chooses a plan, and the blocks that are streamed, for the step of *profile*.

    Raises:
        ForecastError: the profile does not hold what a prediction needs.
        ReportError: the step in it is damaged.
    """
    return Predictor.of_profile(profile, request, record, correction=correction).choice()
