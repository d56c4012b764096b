"""Plans for policy ``auto``: for the step of a profile, for larger batches, for less memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hf_pyao.config import PyAOConfig
from hf_pyao.integrations.device_limit import beside_bytes, device_limit
from hf_pyao.planning.auto_plan import plan_of
from hf_pyao.planning.calibration import at_other_size
from hf_pyao.planning.copy_lanes import OFFLOAD, RELOAD
from hf_pyao.planning.correction import NO_CORRECTION, Correction, ExpectedTimes
from hf_pyao.planning.plan import Plan
from hf_pyao.planning.plan_request import PlanRequest
from hf_pyao.planning.planner import KEEP_ALL, OFFLOAD_ALL, Candidate, NoPlanFitsError, Planner
from hf_pyao.planning.recorded_step import RecordedStep
from hf_pyao.report.profile_report import Profile

logger = logging.getLogger(__name__)

GAIN = 1.01
"""By how much faster another plan must be for the one that is followed to be left for it, where
times turned out otherwise than predicted."""

TIGHTER = 0.92
"""Share of the peak that is planned for after the device ran out of memory all the same."""


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
        config: PyAOConfig,
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
        self._planner: Planner | None = None
        self._limit_bytes = math.inf
        self._beside_bytes = 0
        self._correction = NO_CORRECTION
        self.chosen: Candidate | None = None
        """The plan that is followed; None before it, and after :meth:`forget`."""
        self.before: Candidate | None = None
        """The plan that it was taken in place of, since times were off; None: there is none."""
        self.num_elements = 0
        """Of the batch of the step that is planned for."""
        self.marks: dict[str, float] = {}
        """More figures for plans to hold."""

    @property
    def can_plan(self) -> bool:
        """True once there is a step to plan for."""
        return self._planner is not None and self.chosen is not None

    @property
    def keeps_all(self) -> bool:
        """True if the plan that is followed is to do nothing."""
        return self.chosen is not None and self.chosen.name == KEEP_ALL

    @property
    def fallback(self) -> Candidate | None:
        """Offloading everything, if that fits and is not what is followed."""
        found = None if self._planner is None else self._planner.simple().get(OFFLOAD_ALL)
        if found is None or found.peak_bytes > self._limit_bytes:
            return None
        return None if self.chosen is None or self.chosen.name == OFFLOAD_ALL else found

    def forget(self) -> None:
        """Plan no more."""
        self._profile = self._planner = self.chosen = self.before = None
        self._correction = NO_CORRECTION

    def plan(self, profile: Profile, num_elements: int) -> tuple[Plan, str]:
        """Take the fastest plan for the step of *profile* that fits; return it and its limit.

        Args:
            profile: with its step in it.
            num_elements: of the step's batch.

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
        resident_bytes = planner.program.resident_bytes
        self._beside_bytes = beside_bytes(limit, resident_bytes, self._parameters())
        self._limit_bytes = limit.nbytes - self._beside_bytes
        self._profile, self._planner = profile, planner
        self.num_elements = num_elements
        self.before = None
        return self._choose(planner), limit.how

    def plan_larger(self, recorded: RecordedStep, num_elements: int) -> tuple[Plan, str]:
        """Take the fastest plan for the step of a larger batch, its times in proportion.

        Args:
            recorded: its step.
            num_elements: of its batch.

        Raises:
            ReportError: the step is damaged.
        """
        profile, planner = self._profile, self._planner
        assert profile is not None
        assert planner is not None
        return self.plan(at_other_size(profile, planner.program, recorded), num_elements)

    def expected(self, correction: Correction = NO_CORRECTION) -> ExpectedTimes:
        """Return what is predicted for the plan that is followed, its times corrected further."""
        chosen = self.chosen
        assert chosen is not None
        if correction is not NO_CORRECTION:
            chosen = self._planner_with(correction).again(chosen)
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
        chosen = self.chosen
        assert chosen is not None
        planner = self._planner_with(correction)
        now = planner.again(chosen)
        self._correction = self._correction.times(correction)
        self._planner = planner
        try:
            best = planner.best(self._limit_bytes)
        except NoPlanFitsError:  # which was said before
            best = now
        if best.step_ms * GAIN < now.step_ms:
            self.before = now
            return self._document(planner, best), True
        return self._document(planner, now), False

    def _planner_with(self, correction: Correction) -> Planner:
        assert self._profile is not None
        return self._request.planner(self._profile, correction=self._correction.times(correction))

    def plan_tighter(self) -> Plan | None:
        """Take a plan with a lower peak than the one that is followed; None if there is none."""
        planner, chosen = self._planner, self.chosen
        if planner is None or chosen is None:
            return None
        least = planner.least()
        if chosen.peak_bytes <= least.peak_bytes:
            return None
        self._limit_bytes = max(TIGHTER * chosen.peak_bytes, least.peak_bytes)
        self.before = None
        return self._choose(planner)

    def fall_back(self, fallback: Candidate) -> Plan:
        """Take :attr:`fallback`, or :attr:`before`."""
        self.before = None
        assert self._planner is not None
        return self._document(self._planner, fallback)

    def _choose(self, planner: Planner) -> Plan:
        """Take the fastest plan within the limit, or the one with the lowest peak."""
        try:
            chosen = planner.best(self._limit_bytes)
        except NoPlanFitsError as error:
            chosen = planner.least()
            logger.warning(
                "policy 'auto': %s It is taken all the same. What would help: "
                "head_loss='chunked', a smaller micro-batch, shorter sequences.",
                error,
            )
        return self._document(planner, chosen)

    def _document(self, planner: Planner, chosen: Candidate) -> Plan:
        self.chosen = chosen
        return plan_of(
            planner,
            chosen,
            limit_bytes=self._limit_bytes + self._beside_bytes,
            model=self._identity,
            figures={
                "beside_bytes": float(self._beside_bytes),
                "num_elements": float(self.num_elements),
                **self.marks,
                **self._correction.figures(),
            },
        )
