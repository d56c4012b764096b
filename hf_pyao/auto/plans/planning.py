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

from hf_pyao.auto.plans.draft import Draft, Limits, Record, choice_of, chosen_within
from hf_pyao.auto.plans.settings import AutoSettings
from hf_pyao.auto.plans.unrecorded import explain, kept_peak_bytes, plan_that_fits
from hf_pyao.levers import Levers
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.documents.plan_facts import PlanFacts
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.hardware.device_limit import beside_bytes
from hf_pyao.plan.measure.segment_memory import (
    NOTHING,
    MeasuredGrowth,
    SegmentMemory,
    differences,
    predicted_growth,
    unpredicted_bytes,
)
from hf_pyao.plan.options.chosen_levers import FIXED, LeverRoom
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.predict.calibration import at_other_size
from hf_pyao.plan.solve.correction import NO_CORRECTION
from hf_pyao.plan.solve.planner import OFFLOAD_ALL, Candidate, Planner
from hf_pyao.plan.step.recorded_step import RecordedStep
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.plan.weights.choice import StreamingChoice

logger = logging.getLogger(__name__)

ROOM = 1.25
"""A plan that is made because batches have grown is to fit for batches this many times larger: with
dynamic padding the next ones are likely to be larger still."""

AFTER_RUNNING_OUT = "what the device was planned to hold since it ran out of memory"


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
        self.growth = MeasuredGrowth()
        """Of the step that was measured last."""
        self.unpredicted_bytes = 0
        """By how much the plan that was made last is expected to take more than is predicted."""
        self._more: dict[str, int] = {}
        """What was measured beside the prediction, by segment. Every later plan leaves room for
        that."""
        self._beyond: dict[str, int] = {}
        """By how much other ranks' memory grew more than this one's, by segment. A profile is of
        all ranks, and a plan is measured on this one."""

    def plan(
        self,
        profile: Profile,
        num_elements: int,
        record: Record | None = None,
        room: LeverRoom = FIXED,
        *,
        cap_bytes: float = math.inf,
        trained: int | None = None,
        smaller: Draft | None = None,
    ) -> Draft:
        """Take the fastest plan for the step of *profile* that fits.

        Args:
            profile: with its step in it.
            num_elements: of the step's batch.
            record: records the step with other levers; None: it cannot be.
            room: which of them may be chosen.
            cap_bytes: most bytes that the step may need, whatever the device has.
            trained: which parameters are trained, as ``PlanFacts.trained``.
            smaller: for the batches before, which were smaller.

        Raises:
            ForecastError: the profile does not hold what a prediction needs.
            ReportError: the step in it is damaged.
        """
        request = dataclasses.replace(self._request, room=room)
        once = None if record is None else _recorded_once(record)
        correction = NO_CORRECTION if smaller is None else smaller.correction
        least_streamed = 0 if smaller is None else smaller.least_streamed
        choice = choice_of(request, profile, once, correction)
        measured = choice.resident.configured.simple().get(OFFLOAD_ALL)
        self._beyond = profile.grown_beyond_bytes
        if smaller is None and measured is not None:
            self._note_memory(profile.grown_bytes, NOTHING, measured)
        growth, room_to_grow = None, 1.0
        if smaller is not None:
            ratio = num_elements / max(1, smaller.num_elements)
            before, now = smaller.choice.resident.configured, choice.resident.configured
            growth = _growth_exponent(before, now, ratio) or smaller.growth_exponent
            room_to_grow = ROOM ** (growth or 2.0)
        resident_bytes = choice.least_resident_bytes
        while True:
            limits = self._limits(choice, cap_bytes)
            with_room = resident_bytes + (limits.limit_bytes - resident_bytes) / room_to_grow
            followed = chosen_within(choice, with_room, limits.limit_bytes, least_streamed)
            if not (followed.fits and self._takes_more(followed.candidate)):
                break
        return Draft(
            followed=followed,
            profile=profile,
            num_elements=num_elements,
            request=request,
            record=once,
            limits=limits,
            choice=choice,
            identity=self._identity,
            correction=correction,
            growth_exponent=growth,
            least_streamed=least_streamed,
            trained=trained,
        )

    def larger(
        self, draft: Draft, recorded: RecordedStep, num_elements: int, *args: Any, **more: Any
    ) -> Draft:
        """Take the fastest plan for the step of a larger batch, its times in proportion.

        Args:
            draft: for the batches before.
            recorded: its step.
            num_elements: of its batch.
            args: as for :meth:`plan`.
            more: the same.

        Raises:
            ReportError: the step is damaged.
        """
        before = draft.choice.resident.configured
        profile = at_other_size(draft.profile, before.program, recorded)
        return self.plan(profile, num_elements, *args, trained=draft.trained, smaller=draft, **more)

    def remeasured(self, draft: Draft, memory: SegmentMemory | None) -> tuple[Draft, bool]:
        """Take what the plan that is followed was measured to need, and a tighter one if needed.

        Args:
            draft: the plan that is followed.
            memory: what its step took; None: nothing was measured.

        Returns:
            The draft with what may be used now, and whether its plan is another one.
        """
        if memory is not None:
            grown_bytes = self._of_ranks(memory.grown_bytes)
            self._note_memory(grown_bytes, self._of_ranks(memory.most_bytes), draft.chosen)
        is_capped = draft.limits.how == AFTER_RUNNING_OUT
        cap_bytes = draft.limits.limit_bytes if is_capped else math.inf
        draft = dataclasses.replace(draft, limits=self._limits(draft.choice, cap_bytes))
        limit_bytes = draft.limits.limit_bytes
        if draft.chosen.memory.fits(limit_bytes):
            return draft, False
        found = draft.choice.best(limit_bytes, draft.least_streamed).levers
        while found.fits and self._takes_more(found.candidate):
            draft = dataclasses.replace(draft, limits=self._limits(draft.choice, cap_bytes))
            found = draft.choice.best(draft.limits.limit_bytes, draft.least_streamed).levers
        if not found.fits and found.candidate.peak_bytes >= draft.chosen.peak_bytes:
            return draft, False  # nothing needs less
        return draft.following(found), True

    def _of_ranks(self, nbytes: Mapping[str, int]) -> dict[str, int]:
        return {name: each + self._beyond.get(name, 0) for name, each in nbytes.items()}

    def _note_memory(
        self, grown_bytes: Mapping[str, int], most_bytes: Mapping[str, int], ran: Candidate
    ) -> None:
        """Compare what was measured with the least that is predicted for what *ran*."""
        if grown_bytes:
            predicted = _growth(ran)
            self.growth = MeasuredGrowth(grown_bytes, predicted)
            # What runs again is compared in a run's first micro-batches, which holds more.
            compares = self._settings.recomputes or self._settings.given.levers.checkpoint_every
            earlier = NOTHING if compares else self._more
            self._more = differences(grown_bytes, predicted, most_bytes, earlier)
            self.unpredicted_bytes = unpredicted_bytes(self._more, predicted)

    def _takes_more(self, chosen: Candidate) -> bool:
        """Say whether *chosen* is expected to take more beside its prediction than it was left."""
        more_bytes = unpredicted_bytes(self._more, _growth(chosen)) if self._more else 0
        is_more = more_bytes > self.unpredicted_bytes
        self.unpredicted_bytes = max(self.unpredicted_bytes, more_bytes)
        return is_more

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


def _growth(candidate: Candidate) -> dict[str, int]:
    """Return the predicted growth of memory under a plan, by segment."""
    # With copies as early as can be: how early they were is not known.
    return predicted_growth(candidate.step.program, candidate.outcome.early())


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
