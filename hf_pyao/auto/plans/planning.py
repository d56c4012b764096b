"""Plans for policy ``auto``: for the step of a profile, for larger batches, for less memory.

Making a plan returns a :class:`Draft`; the draft that is followed stays as it was.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hf_pyao.auto.plans.draft import Draft, Limits, Record, choice_of
from hf_pyao.auto.plans.settings import AutoSettings
from hf_pyao.auto.plans.unrecorded import explain, kept_peak_bytes, plan_that_fits
from hf_pyao.errors import warn
from hf_pyao.levers import Levers, LeversRefusedError
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.documents.plan_facts import PlanFacts
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.hardware.device_limit import beside_bytes
from hf_pyao.plan.measure.segment_memory import predicted_growth, unpredicted_bytes
from hf_pyao.plan.options.auto_plan import plan_of_choice
from hf_pyao.plan.options.chosen_levers import FIXED, ChosenLevers, LeverRoom
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.predict.calibration import at_other_size
from hf_pyao.plan.solve.correction import NO_CORRECTION, Correction
from hf_pyao.plan.solve.planner import OFFLOAD_ALL, Candidate, Planner
from hf_pyao.plan.step.recorded_step import RecordedStep
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.plan.weights.choice import StreamingChoice
from hf_pyao.plan.weights.weight_plan import figures_of, less_by_streaming, weight_plan_of

logger = logging.getLogger(__name__)

GAIN = 1.01
"""How many times faster another plan must be to replace the one that is followed, after times were
corrected."""

ROOM = 1.25
"""A plan that is made because batches have grown is to fit for batches this many times larger: with
dynamic padding the next ones are likely to be larger still."""

TIGHTER = 0.92
"""After the device ran out of memory, the next plan may need this share of what the plan needed."""

AFTER_RUNNING_OUT = "what the device was planned to hold since it ran out of memory"


def _no_other(levers: Levers) -> StepProgram:
    raise LeversRefusedError("the step cannot be recorded again")


class PlanMaker:
    """Makes plans for one model's steps.

    Args:
        device: where the model is.
        settings: what policy ``auto`` takes from the configuration.
        request: the same for the planner.
        identity: what tells the model.
        parameters: returns the model's parameters.
        num_resident: returns how many layers' frozen weights are on the device now; None: all.
    """

    def __init__(
        self,
        device: torch.device,
        settings: AutoSettings,
        request: PlanRequest,
        identity: Mapping[str, Any],
        parameters: Callable[[], Iterable[nn.Parameter]],
        num_resident: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._device = device
        self._settings = settings
        self._request = request
        self._identity = dict(identity)
        self._parameters = parameters
        self._num_resident = num_resident
        self.unpredicted_bytes = 0
        """By how much the step that was measured last takes more than is predicted for it. Every
        later plan leaves room for that."""

    def plan(
        self,
        profile: Profile,
        num_elements: int,
        record: Record | None = None,
        room: LeverRoom = FIXED,
        *,
        cap_bytes: float = math.inf,
        trained: int | None = None,
    ) -> Draft:
        """Take the fastest plan for the step of *profile* that fits.

        Args:
            profile: with its step in it.
            num_elements: of the step's batch.
            record: records the step with other levers; None: it cannot be.
            room: which of them may be chosen.
            cap_bytes: most bytes that the step may need, whatever the device has.
            trained: which parameters are trained, as ``PlanFacts.trained``.

        Raises:
            ForecastError: the profile does not hold what a prediction needs.
            ReportError: the step in it is damaged.
        """
        request = dataclasses.replace(self._request, room=room)
        once = _recorded_once(record or _no_other)
        choice = choice_of(request, profile, once)
        measured = choice.resident.configured.simple().get(OFFLOAD_ALL)
        if measured is not None:
            self._note_memory(profile.grown_bytes, measured)
        limits = self._limits(choice, cap_bytes)
        found = _chosen(choice, limits.limit_bytes, limits.limit_bytes)
        return self._draft(
            found, profile, num_elements, request, once, limits, choice, trained=trained
        )

    def larger(
        self,
        draft: Draft,
        recorded: RecordedStep,
        num_elements: int,
        record: Record | None = None,
        room: LeverRoom = FIXED,
        *,
        cap_bytes: float = math.inf,
    ) -> Draft:
        """Take the fastest plan for the step of a larger batch, its times in proportion.

        Args:
            draft: for the batches before.
            recorded: its step.
            num_elements: of its batch.
            record: as for :meth:`plan`.
            room: the same.
            cap_bytes: the same.

        Raises:
            ReportError: the step is damaged.
        """
        before = draft.choice.resident.configured
        profile = at_other_size(draft.profile, before.program, recorded)
        request = dataclasses.replace(self._request, room=room)
        once = _recorded_once(record or _no_other)
        choice = choice_of(request, profile, once, draft.correction)
        configured = choice.resident.configured
        limits = self._limits(choice, cap_bytes)
        ratio = num_elements / max(1, draft.num_elements)
        growth = _growth_exponent(before, configured, ratio) or draft.growth_exponent
        resident_bytes = choice.least_resident_bytes
        room_to_grow: float = ROOM ** (growth or 2.0)
        with_room = resident_bytes + (limits.limit_bytes - resident_bytes) / room_to_grow
        return self._draft(
            _chosen(choice, with_room, limits.limit_bytes, draft.least_streamed),
            profile,
            num_elements,
            request,
            once,
            limits,
            choice,
            correction=draft.correction,
            growth_exponent=growth,
            trained=draft.trained,
            least_streamed=draft.least_streamed,
        )

    def in_room(self, draft: Draft, room: LeverRoom) -> Draft:
        """Take the fastest plan for the same step, where other levers may be chosen than before."""
        request = dataclasses.replace(draft.request, room=room)
        draft = dataclasses.replace(draft, request=request, before=None)
        choice = draft.choice_with(NO_CORRECTION)
        limit_bytes = draft.limits.limit_bytes
        found = _chosen(choice, limit_bytes, limit_bytes, draft.least_streamed)
        return self._follow(draft, found, choice=choice)

    def corrected(self, draft: Draft, correction: Correction) -> tuple[Draft, bool]:
        """Take the fastest plan for times that differ from those of the plan that is followed.

        Returns:
            It, and whether it is another one: that must be faster by :data:`GAIN`.
        """
        choice = draft.choice_with(correction)
        as_now = choice.with_streamed(draft.num_streamed)
        planner = as_now.planner_for(draft.followed.levers)
        now = planner.again(draft.followed.candidate)
        followed = dataclasses.replace(
            draft.followed, candidate=now, planner=planner, configured=as_now.configured
        )
        draft = dataclasses.replace(draft, correction=draft.correction.times(correction))
        # Where nothing fits, that was said before.
        found = choice.best(draft.limits.limit_bytes, draft.least_streamed).levers
        if found.fits and found.candidate.step_ms * GAIN < now.step_ms:
            return self._follow(draft, found, choice=choice, before=followed), True
        return self._follow(draft, followed, choice=choice, before=draft.before), False

    def remeasured(self, draft: Draft, grown_bytes: Mapping[str, int]) -> tuple[Draft, bool]:
        """Take what the plan that is followed was measured to need, and a tighter one if needed.

        Args:
            draft: the plan that is followed.
            grown_bytes: as :class:`~hf_pyao.plan.measure.segment_memory.SegmentMemory` found it.

        Returns:
            The draft with what may be used now, and whether its plan is another one.
        """
        self._note_memory(grown_bytes, draft.chosen)
        is_capped = draft.limits.how == AFTER_RUNNING_OUT
        cap_bytes = draft.limits.limit_bytes if is_capped else math.inf
        draft = dataclasses.replace(draft, limits=self._limits(draft.choice, cap_bytes))
        limit_bytes = draft.limits.limit_bytes
        if draft.chosen.memory.fits(limit_bytes):
            return draft, False
        found = draft.choice.best(limit_bytes, draft.least_streamed).levers
        if not found.fits and found.candidate.peak_bytes >= draft.chosen.peak_bytes:
            return draft, False  # nothing needs less
        return self._follow(draft, found, choice=draft.choice), True

    def _note_memory(self, grown_bytes: Mapping[str, int], ran: Candidate) -> None:
        """Compare what was measured with the least that is predicted for what *ran*."""
        if grown_bytes:
            # With copies as early as can be: how early they were is not known.
            least = ran.late if ran.early is None else ran.early()
            predicted = predicted_growth(ran.step.program, least)
            self.unpredicted_bytes = unpredicted_bytes(grown_bytes, predicted)

    def tighter(self, draft: Draft) -> Draft | None:
        """Take a plan with a lower peak than the one that is followed; None if there is none.

        No fewer blocks of frozen weights are streamed than now, in this plan and in later ones.
        """
        draft = dataclasses.replace(draft, least_streamed=draft.num_streamed)
        before_bytes = draft.chosen.memory.needed_bytes
        limit_bytes = TIGHTER * before_bytes
        found = draft.choice.best(limit_bytes, draft.least_streamed).levers
        if not found.fits:
            # The lowest peak of all settings that were looked at just now, if it is lower at all.
            least_bytes = found.candidate.memory.needed_bytes
            if least_bytes >= before_bytes:
                return None
            limit_bytes = least_bytes
            found = draft.choice.best(limit_bytes, draft.least_streamed).levers
        limits = dataclasses.replace(draft.limits, limit_bytes=limit_bytes)
        return self._follow(dataclasses.replace(draft, limits=limits), found, choice=draft.choice)

    def fall_back(self, draft: Draft, fallback: ChosenLevers) -> Draft:
        """Take :attr:`Draft.fallback`, or :attr:`Draft.before`."""
        return self._follow(draft, fallback, choice=draft.choice)

    def plan_unrecorded(
        self, profile: Profile, num_elements: int, trained: int | None = None
    ) -> tuple[Plan, str] | None:
        """Return the plan that keeps what fits, and its limit; None if nothing may be kept.

        Args:
            profile: without a step in it.
            num_elements: of the batches that were measured.
            trained: which parameters are trained, as ``PlanFacts.trained``.
        """
        limit = self._settings.device_limit(self._device)
        if limit is None or self._settings.recomputes:
            return None
        kept_bytes = kept_peak_bytes(profile, self._parameters(), num_elements)
        facts = PlanFacts(num_elements=num_elements, trained=trained)
        levers = self._settings.given.levers
        kept = levers.kept_layers(len(profile.layer_names), self._request.keep_last_layers)
        plan = plan_that_fits(limit, kept_bytes, profile, kept, self._identity, facts)
        return None if plan is None else (plan, explain(limit, plan, profile.why_no_program))

    def _limits(self, choice: StreamingChoice, cap_bytes: float) -> Limits:
        limit = self._settings.device_limit(self._device)
        assert limit is not None, "nothing is measured where no limit is known"
        resident_bytes = choice.resident_bytes(self._num_resident())
        nbytes = beside_bytes(limit, resident_bytes, self._parameters())
        limit_bytes = min(limit.nbytes - nbytes - self.unpredicted_bytes, cap_bytes)
        how = limit.how if limit_bytes < cap_bytes else AFTER_RUNNING_OUT
        return Limits(limit_bytes, limit.nbytes, nbytes, how)

    def _follow(
        self,
        draft: Draft,
        found: ChosenLevers,
        *,
        choice: StreamingChoice,
        before: ChosenLevers | None = None,
    ) -> Draft:
        """Return *draft* with another plan for the same step."""
        return self._draft(
            found,
            draft.profile,
            draft.num_elements,
            draft.request,
            draft.record,
            draft.limits,
            choice,
            before=before,
            correction=draft.correction,
            growth_exponent=draft.growth_exponent,
            trained=draft.trained,
            least_streamed=draft.least_streamed,
        )

    def _draft(
        self,
        found: ChosenLevers,
        profile: Profile,
        num_elements: int,
        request: PlanRequest,
        record: Record,
        limits: Limits,
        choice: StreamingChoice,
        *,
        before: ChosenLevers | None = None,
        correction: Correction = NO_CORRECTION,
        growth_exponent: float | None = None,
        trained: int | None,
        least_streamed: int = 0,
    ) -> Draft:
        program = found.planner.program
        weights = weight_plan_of(program) if choice.may_stream else None
        plan = plan_of_choice(
            found,
            limit_bytes=limits.limit_bytes + limits.beside_bytes,
            model=self._identity,
            facts=PlanFacts(
                num_elements=num_elements,
                trained=trained,
                device_limit_bytes=limits.device_bytes,
                beside_bytes=int(limits.beside_bytes),
                resident_bytes=program.resident_bytes,
                growth_exponent=growth_exponent,
                resident_blocks=None if weights is None else weights.num_resident,
            ),
            figures={
                **correction.figures(),
                **({} if weights is None else figures_of(weights)),
            },
        )
        return Draft(
            plan=plan,
            profile=profile,
            num_elements=num_elements,
            request=request,
            record=record,
            limits=limits,
            choice=choice,
            followed=found,
            before=before,
            correction=correction,
            growth_exponent=growth_exponent,
            trained=trained,
            least_streamed=least_streamed,
        )


def _chosen(
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


def _growth_exponent(before: Planner, now: Planner, ratio: float) -> float | None:
    """Return by which power of a batch's elements memory grows; None: there is no telling.

    Args:
        before: for the smaller batch.
        now: for the larger batch.
        ratio: of their elements.
    """
    resident_bytes = now.program.resident_bytes
    before_bytes = before.kept.peak_bytes
    now_bytes = now.kept.peak_bytes
    if ratio <= 1 or not now_bytes > before_bytes > resident_bytes:
        return None
    growth = (now_bytes - resident_bytes) / (before_bytes - resident_bytes)
    # Two sizes do not tell of a third: a little more than what was found.
    return min(2.0, max(1.0, 1.05 * math.log(growth) / math.log(ratio)))


def _recorded_once(record: Record) -> Record:
    """Return what records the step with each setting of the levers once."""
    known: dict[Levers, StepProgram] = {}

    def recorded(levers: Levers) -> StepProgram:
        if levers not in known:
            known[levers] = record(levers)
        return known[levers]

    return recorded
