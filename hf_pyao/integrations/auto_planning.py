"""Plans for policy ``auto``: for the step of a profile, for larger batches, for less memory."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hf_pyao.documents.plan import Plan
from hf_pyao.documents.plan_facts import PlanFacts
from hf_pyao.documents.profile import Profile
from hf_pyao.integrations.auto_settings import AutoSettings
from hf_pyao.integrations.auto_unrecorded import explain, kept_peak_bytes, plan_if_all_fits
from hf_pyao.integrations.device_limit import beside_bytes, device_limit
from hf_pyao.levers import Levers, LeversRefusedError
from hf_pyao.planning.auto_plan import plan_of_choice
from hf_pyao.planning.calibration import at_other_size
from hf_pyao.planning.copy_lanes import OFFLOAD, RELOAD
from hf_pyao.planning.correction import NO_CORRECTION, Correction, ExpectedTimes
from hf_pyao.planning.lever_choice import FIXED, ChosenLevers, LeverChoice, LeverRoom
from hf_pyao.planning.plan_request import PlanRequest
from hf_pyao.planning.planner import KEEP_ALL, OFFLOAD_ALL, Candidate, Planner
from hf_pyao.planning.recorded_step import RecordedStep
from hf_pyao.planning.step_program import StepProgram

logger = logging.getLogger(__name__)

GAIN = 1.01
"""By how much faster another plan must be for the one that is followed to be left for it, where
times turned out otherwise than predicted."""

ROOM = 1.25
"""Times larger batches for which a plan is to fit that is made since batches have grown: with
dynamic padding the next ones are likely to be larger still."""

TIGHTER = 0.92
"""Share of what the plan needs that is planned for after the device ran out of memory with it."""

AFTER_RUNNING_OUT = "what the device was planned to hold since it ran out of memory"

Record = Callable[[Levers], StepProgram]
"""Records the step with other levers; raises LeversRefusedError where it cannot."""


def _no_other(levers: Levers) -> StepProgram:
    raise LeversRefusedError("the step cannot be recorded again")


class PlanMaker:
    """Chooses plans for one model's step, and knows which one was chosen last.

    Args:
        device: where the model is.
        config: what binds the plan, and the limit that is given.
        request: the same for the planner.
        identity: what tells the model.
        parameters: returns the model's parameters.
    """

    def __init__(
        self,
        device: torch.device,
        config: AutoSettings,
        request: PlanRequest,
        identity: Mapping[str, Any],
        parameters: Callable[[], Iterable[nn.Parameter]],
    ) -> None:
        self._device = device
        self._config = config
        self._request = request
        self._identity = dict(identity)
        self._parameters = parameters
        self._profile: Profile | None = None
        self._choice: LeverChoice | None = None
        self._record: Record = _no_other
        self._steps: dict[Levers, StepProgram] = {}
        self._limit_bytes = math.inf
        self._device_limit_bytes = 0
        self._grows_from: tuple[float, int] | None = None
        """While it is planned for a larger batch: how many times larger, and what keeping
        everything took before."""
        self._growth_exponent: float | None = None
        """By which power of a batch's elements its step's memory grows; None: not known."""
        self._most_bytes = math.inf
        """Less than the device was planned to hold when it ran out of memory all the same."""
        self._beside_bytes = 0
        self._correction = NO_CORRECTION
        self._followed: ChosenLevers | None = None
        self._before: ChosenLevers | None = None
        self.num_elements = 0
        """Of the batch of the step that is planned for."""
        self.trained: int | None = None
        """Which parameters are trained, as :attr:`PlanFacts.trained`; None: not known."""

    @property
    def chosen(self) -> Candidate | None:
        """The plan that is followed; None before it, and after :meth:`forget`."""
        return None if self._followed is None else self._followed.candidate

    @property
    def before(self) -> Candidate | None:
        """The plan that it was taken in place of, since times were off; None: there is none."""
        return None if self._before is None else self._before.candidate

    @property
    def levers(self) -> Levers:
        """Those of the plan that is followed; as configured before it."""
        return self._request.levers if self._followed is None else self._followed.levers

    @property
    def _planner(self) -> Planner | None:
        return None if self._followed is None else self._followed.planner

    @property
    def can_plan(self) -> bool:
        """True once there is a step to plan for."""
        return self._choice is not None and self.chosen is not None

    @property
    def keeps_all(self) -> bool:
        """True if the plan that is followed is to do nothing."""
        is_kept = self.chosen is not None and self.chosen.name == KEEP_ALL
        return is_kept and not self.levers.checkpoint_every

    @property
    def fallback(self) -> Candidate | None:
        """Offloading everything of the step as configured, if that fits and is not followed."""
        found = None if self._choice is None else self._choice.configured.simple().get(OFFLOAD_ALL)
        if found is None or not found.memory.fits(self._limit_bytes):
            return None
        is_it = self.chosen is not None and self.chosen.name == OFFLOAD_ALL
        is_followed = is_it and self.levers == self._request.levers
        return None if self.chosen is None or is_followed else found

    def forget(self) -> None:
        """Plan no more."""
        self._profile = self._choice = self._followed = self._before = None
        self._correction = NO_CORRECTION

    def plan(
        self,
        profile: Profile,
        num_elements: int,
        record: Record | None = None,
        room: LeverRoom = FIXED,
    ) -> tuple[Plan, str]:
        """Take the fastest plan for the step of *profile* that fits; return it and its limit.

        Args:
            profile: with its step in it.
            num_elements: of the step's batch.
            record: records the step with other levers; None: it cannot be.
            room: which of them may be chosen.

        Raises:
            ForecastError: the profile does not hold what a prediction needs.
            ReportError: the step in it is damaged.
        """
        planner = self._request.planner(profile, correction=self._correction)
        limit = device_limit(
            self._device,
            self._config.device_memory_gib,
            self._config.label("device_memory_gib"),
        )
        assert limit is not None
        self._device_limit_bytes = limit.nbytes
        resident_bytes = planner.program.resident_bytes
        self._beside_bytes = beside_bytes(limit, resident_bytes, self._parameters())
        self._limit_bytes = min(limit.nbytes - self._beside_bytes, self._most_bytes)
        self._profile = profile
        self._record = record or _no_other
        self._request = dataclasses.replace(self._request, room=room)
        self.num_elements = num_elements
        self._before = None
        self._steps = {}
        self._choice = self._choice_for(planner)
        return (
            self._choose(),
            limit.how if self._limit_bytes < self._most_bytes else AFTER_RUNNING_OUT,
        )

    def plan_unrecorded(self, profile: Profile, num_elements: int) -> tuple[Plan, str] | None:
        """Return the plan that keeps everything, and its limit, if all fits; None if not.

        Args:
            profile: without a step in it.
            num_elements: of the batches that were measured.
        """
        limit = device_limit(
            self._device,
            self._config.device_memory_gib,
            self._config.label("device_memory_gib"),
        )
        if limit is None or self._config.recomputes:
            return None
        kept_bytes = kept_peak_bytes(profile, self._parameters(), num_elements)
        facts = PlanFacts(num_elements=num_elements, trained=self.trained)
        plan = plan_if_all_fits(limit, kept_bytes, self._identity, facts)
        return None if plan is None else (plan, explain(limit, plan, profile.why_no_program))

    def plan_larger(
        self,
        recorded: RecordedStep,
        num_elements: int,
        record: Record | None = None,
        room: LeverRoom = FIXED,
    ) -> tuple[Plan, str]:
        """Take the fastest plan for the step of a larger batch, its times in proportion.

        Args:
            recorded: its step.
            num_elements: of its batch.
            record: as for :meth:`plan`.
            room: the same.

        Raises:
            ReportError: the step is damaged.
        """
        profile, choice = self._profile, self._choice
        assert profile is not None
        assert choice is not None
        before = choice.configured
        ratio = num_elements / max(1, self.num_elements)
        kept_bytes = before.simple()[KEEP_ALL].peak_bytes
        self._grows_from = (ratio, kept_bytes)
        try:
            scaled = at_other_size(profile, before.program, recorded)
            return self.plan(scaled, num_elements, record, room)
        finally:
            self._grows_from = None

    def plan_in(self, room: LeverRoom) -> Plan:
        """Take the fastest plan for the same step, where other levers may be chosen than before."""
        self._request = dataclasses.replace(self._request, room=room)
        self._before = None
        self._choice = self._choice_with(NO_CORRECTION)
        return self._choose()

    def expected(self, correction: Correction = NO_CORRECTION) -> ExpectedTimes:
        """Return what is predicted for the plan that is followed, its times corrected further."""
        chosen = self.chosen
        assert chosen is not None
        if correction is not NO_CORRECTION:
            chosen = self._choice_with(correction).planner_for(self.levers).again(chosen)
        return ExpectedTimes.of(chosen.step, chosen.timed)

    @property
    def copies_ms(self) -> float:
        """What the copies of the plan that is followed need on the link, both ways."""
        planner, chosen = self._planner, self.chosen
        assert planner is not None
        assert chosen is not None
        link, nbytes = planner.conditions.link, chosen.timed.offloaded_bytes
        return link.copy_ms(OFFLOAD, nbytes) + link.copy_ms(RELOAD, nbytes) if nbytes else 0.0

    def plan_corrected(self, correction: Correction) -> tuple[Plan, bool]:
        """Take the fastest plan for times that differ from those of the plan that is followed.

        Returns:
            It, and whether it is another one: that must be faster by :data:`GAIN`.
        """
        assert self._followed is not None
        choice = self._choice_with(correction)
        planner = choice.planner_for(self._followed.levers)
        now = planner.again(self._followed.candidate)
        followed = dataclasses.replace(
            self._followed, candidate=now, planner=planner, configured=choice.configured
        )
        self._correction = self._correction.times(correction)
        self._choice = choice
        found = choice.best(self._limit_bytes)  # where nothing fits, that was said before
        if found.fits and found.candidate.step_ms * GAIN < now.step_ms:
            self._before = followed
            return self._document(found), True
        return self._document(followed), False

    def _choice_with(self, correction: Correction) -> LeverChoice:
        """Return the choice for times that are corrected further."""
        assert self._profile is not None
        correction = self._correction.times(correction)
        return self._choice_for(self._request.planner(self._profile, correction=correction))

    def _choice_for(self, configured: Planner) -> LeverChoice:
        return self._request.choice(configured, self._step_with, dtypes=self._dtypes())

    def _step_with(self, levers: Levers) -> StepProgram:
        """Return the step with other levers, recorded once."""
        if levers not in self._steps:
            self._steps[levers] = self._record(levers)
        return self._steps[levers]

    def plan_tighter(self) -> Plan | None:
        """Take a plan with a lower peak than the one that is followed; None if there is none."""
        choice, chosen = self._choice, self.chosen
        if choice is None or chosen is None:
            return None
        before_bytes = chosen.memory.needed_bytes
        limit_bytes = TIGHTER * before_bytes
        found = choice.best(limit_bytes)
        if not found.fits:
            # Whatever is tighter at all, of all settings that were looked at just now.
            least_bytes = found.candidate.memory.needed_bytes
            if least_bytes >= before_bytes:
                return None
            limit_bytes = least_bytes
            found = choice.best(limit_bytes)
        self._limit_bytes = self._most_bytes = limit_bytes
        self._before = None
        return self._document(found)

    def fall_back(self, fallback: Candidate) -> Plan:
        """Take :attr:`fallback`, or :attr:`before`."""
        before, self._before = self._before, None
        if before is not None and fallback is before.candidate:
            return self._document(before)
        assert self._choice is not None
        return self._document(self._choice.as_configured(fallback))

    def _choose(self) -> Plan:
        """Take the fastest plan within the limit, or the one with the lowest peak."""
        assert self._choice is not None
        found = self._choice.best(self._limit_with_room())
        if not found.fits:
            found = self._choice.best(self._limit_bytes)
        if not found.fits:
            logger.warning(
                "policy 'auto': %s It is taken all the same. What would help: %s.",
                found.error,
                found.levers.less_memory,
            )
        return self._document(found)

    def _limit_with_room(self) -> float:
        """Return the limit for batches that have grown, with room to grow by :data:`ROOM` more."""
        if self._grows_from is None or self._choice is None:
            return self._limit_bytes
        configured = self._choice.configured
        resident_bytes = configured.program.resident_bytes
        ratio, before_bytes = self._grows_from
        now_bytes = configured.simple()[KEEP_ALL].peak_bytes
        if ratio > 1 and now_bytes > before_bytes > resident_bytes:
            growth = (now_bytes - resident_bytes) / (before_bytes - resident_bytes)
            # Two sizes do not tell of a third: a little more than what was found.
            self._growth_exponent = min(2.0, max(1.0, 1.05 * math.log(growth) / math.log(ratio)))
        room: float = ROOM ** (self._growth_exponent or 2.0)
        return resident_bytes + (self._limit_bytes - resident_bytes) / room

    def _dtypes(self) -> dict[str, str]:
        profile = self._profile
        return {} if profile is None else {slot.name: slot.dtype for slot in profile.slots}

    def _document(self, found: ChosenLevers) -> Plan:
        self._followed = found
        return plan_of_choice(
            found,
            limit_bytes=self._limit_bytes + self._beside_bytes,
            model=self._identity,
            facts=PlanFacts(
                num_elements=self.num_elements,
                trained=self.trained,
                device_limit_bytes=self._device_limit_bytes,
                beside_bytes=int(self._beside_bytes),
                resident_bytes=found.planner.program.resident_bytes,
                growth_exponent=self._growth_exponent,
            ),
            figures=self._correction.figures(),
        )
