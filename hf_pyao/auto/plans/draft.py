"""A plan of policy ``auto``, and what the next one can be made from."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hf_pyao.errors import warn
from hf_pyao.levers import Levers
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.documents.plan_facts import PlanFacts
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.options.auto_plan import plan_of_choice
from hf_pyao.plan.options.chosen_levers import ChosenLevers, LeverRoom
from hf_pyao.plan.options.lever_choice import LeverChoice
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.predict.copy_lanes import OFFLOAD, RELOAD
from hf_pyao.plan.predict.profiled_step import ProfiledStep
from hf_pyao.plan.predictor.predictor import Predictor
from hf_pyao.plan.solve.correction import NO_CORRECTION, Correction, ExpectedTimes
from hf_pyao.plan.solve.planner import KEEP_ALL, OFFLOAD_ALL, Candidate
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.plan.weights.choice import StreamingChoice
from hf_pyao.plan.weights.weight_plan import figures_of, less_by_streaming, weight_plan_of

logger = logging.getLogger(__name__)

GAIN = 1.01
"""How many times faster another plan must be to replace the one that is followed, after times were
corrected."""

TIGHTER = 0.92
"""After the device ran out of memory, the next plan may need this share of what the plan needed."""

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

    followed: ChosenLevers
    profile: Profile
    num_elements: int
    """Of the batch of the step that is planned for."""
    request: PlanRequest
    record: Record | None
    """Records the step with other levers, each once; None: it cannot be."""
    limits: Limits
    choice: StreamingChoice
    identity: Mapping[str, Any]
    """What tells the model."""
    before: ChosenLevers | None = None
    """What the plan replaced since times were off; None: nothing."""
    correction: Correction = NO_CORRECTION
    growth_exponent: float | None = None
    """By which power of a batch's elements its step's memory grows; None: not known."""
    least_streamed: int = 0
    """Blocks of frozen weights that are streamed at least, since memory ran out."""
    trained: int | None = None
    """Which parameters are trained, as ``PlanFacts.trained``; None: not known."""

    @cached_property
    def plan(self) -> Plan:
        """The plan as a document."""
        limits, program = self.limits, self.followed.planner.program
        weights = weight_plan_of(program) if self.choice.may_stream else None
        return plan_of_choice(
            self.followed,
            limit_bytes=limits.limit_bytes + limits.beside_bytes,
            model=self.identity,
            facts=PlanFacts(
                num_elements=self.num_elements,
                trained=self.trained,
                device_limit_bytes=limits.device_bytes,
                beside_bytes=int(limits.beside_bytes),
                resident_bytes=program.resident_bytes,
                growth_exponent=self.growth_exponent,
                resident_blocks=None if weights is None else weights.num_resident,
            ),
            figures={
                **self.correction.figures(),
                **({} if weights is None else figures_of(weights)),
            },
        )

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

    # ---- the next plan for the same step -------------------------------------------------------

    def following(self, found: ChosenLevers) -> Draft:
        """Return the draft in which another plan is followed: :attr:`fallback`, :attr:`before`."""
        return dataclasses.replace(self, followed=found, before=None)

    def in_room(self, room: LeverRoom) -> Draft:
        """Take the fastest plan for the same step, where other levers may be chosen than before."""
        draft = dataclasses.replace(self, request=dataclasses.replace(self.request, room=room))
        choice = draft.choice_with(NO_CORRECTION)
        limit_bytes = self.limits.limit_bytes
        found = chosen_within(choice, limit_bytes, limit_bytes, self.least_streamed)
        return dataclasses.replace(draft, choice=choice).following(found)

    def corrected(self, correction: Correction) -> tuple[Draft, bool]:
        """Take the fastest plan for times that differ from those of the plan that is followed.

        Returns:
            It, and whether it is another one: that must be faster by :data:`GAIN`.
        """
        choice = self.choice_with(correction)
        as_now = choice.with_streamed(self.num_streamed)
        planner = as_now.planner_for(self.followed.levers)
        now = planner.again(self.chosen)
        followed = dataclasses.replace(
            self.followed, candidate=now, planner=planner, configured=as_now.configured
        )
        draft = dataclasses.replace(
            self, choice=choice, followed=followed, correction=self.correction.times(correction)
        )
        # Where nothing fits, that was said before.
        found = choice.best(self.limits.limit_bytes, self.least_streamed).levers
        if found.fits and found.candidate.step_ms * GAIN < now.step_ms:
            return dataclasses.replace(draft, followed=found, before=followed), True
        return draft, False

    def checkpointed(self) -> Draft | None:
        """Let as few of the first layers as fit run again as a whole, and keep the others.

        Times are those of the profile, whatever was corrected since. None if layers may not run
        again, if that does not fit, or if less is done now.
        """
        if self.keeps_all or self.chosen.num_checkpointed:
            return None
        choice = self.choice
        if self.correction != NO_CORRECTION:
            choice = choice_of(self.request, self.profile, self.record)
        levers = choice.with_streamed(self.num_streamed)
        found = levers.configured.fewest_run_again(self.limits.limit_bytes)
        if found is None:
            return None
        draft = dataclasses.replace(self, choice=choice, correction=NO_CORRECTION)
        return dataclasses.replace(
            draft, followed=levers.as_configured(found), before=self.followed
        )

    def tighter(self) -> Draft | None:
        """Take a plan with a lower peak than the one that is followed; None if there is none.

        No fewer blocks of frozen weights are streamed than now, in this plan and in later ones.
        """
        least_streamed = self.num_streamed
        before_bytes = self.chosen.memory.needed_bytes
        limit_bytes = TIGHTER * before_bytes
        found = self.choice.best(limit_bytes, least_streamed).levers
        if not found.fits:
            # The lowest peak of all settings that were looked at just now, if it is lower at all.
            least_bytes = found.candidate.memory.needed_bytes
            if least_bytes >= before_bytes:
                return None
            limit_bytes = least_bytes
            found = self.choice.best(limit_bytes, least_streamed).levers
        limits = dataclasses.replace(self.limits, limit_bytes=limit_bytes)
        draft = dataclasses.replace(self, limits=limits, least_streamed=least_streamed)
        return draft.following(found)


def choice_of(
    request: PlanRequest,
    profile: Profile,
    record: Record | None,
    correction: Correction = NO_CORRECTION,
) -> StreamingChoice:
    """Return what chooses a plan, and the blocks that are streamed, for the step of *profile*.

    Raises:
        ForecastError: the profile does not hold what a prediction needs.
        ReportError: the step in it is damaged.
    """
    profiled = ProfiledStep.of(profile)
    return Predictor.of_profile(profiled, request, record, correction=correction).choice()


def chosen_within(
    choice: StreamingChoice, first_bytes: float, limit_bytes: float, least_streamed: int = 0
) -> ChosenLevers:
    """Take the fastest plan within *first_bytes*, or the limit, or the one with the lowest peak."""
    found = choice.best(first_bytes, least_streamed).levers
    if not found.fits:
        found = choice.best(limit_bytes, least_streamed).levers
    if not found.fits:
        less_memory = found.levers.less_memory
        warn(
            logger,
            "plan-does-not-fit",
            "policy 'auto': %s It is taken all the same. What would help: %s.",
            found.error,
            ", ".join(filter(None, (less_by_streaming(found.planner.program), less_memory))),
        )
    return found
