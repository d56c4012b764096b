"""Plans for policy ``auto``: for the step of a profile, for larger batches, for less memory."""

from __future__ import annotations

import dataclasses
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
from hf_pyao.planning.plan import Plan
from hf_pyao.planning.plan_request import PlanRequest
from hf_pyao.planning.planner import KEEP_ALL, OFFLOAD_ALL, Candidate, NoPlanFitsError, Planner
from hf_pyao.planning.recorded_step import RecordedStep
from hf_pyao.report.profile_report import Profile

logger = logging.getLogger(__name__)

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
        self.chosen: Candidate | None = None
        """The plan that is followed; None before it, and after :meth:`forget`."""
        self.num_elements = 0
        """Of the batch of the step that is planned for."""

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
        self._profile = self._planner = self.chosen = None

    def plan(self, profile: Profile, num_elements: int) -> tuple[Plan, str]:
        """Take the fastest plan for the step of *profile* that fits; return it and its limit.

        Args:
            profile: with its step in it.
            num_elements: of the step's batch.

        Raises:
            ForecastError: the profile does not hold what a prediction needs.
            ReportError: the step in it is damaged.
        """
        planner = self._request.planner(profile)
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

    def plan_for_slower_copies(self, extra_stall_ms: float) -> Plan:
        """Take the fastest plan for copies as slow as the plan that is followed has shown.

        Args:
            extra_stall_ms: by how much longer than predicted a micro-batch waited for copies. The
                link is taken to need so much longer for what the plan moves.
        """
        profile, planner, chosen = self._profile, self._planner, self.chosen
        assert profile is not None
        assert planner is not None
        assert chosen is not None
        link, nbytes = planner.conditions.link, chosen.timed.offloaded_bytes
        copies_ms = link.copy_ms("offload", nbytes) + link.copy_ms("reload", nbytes)
        share = copies_ms / (copies_ms + extra_stall_ms)
        self._planner = self._request.planner(
            profile,
            link=dataclasses.replace(
                link,
                d2h_gib_per_s=share * link.d2h_gib_per_s,
                h2d_gib_per_s=share * link.h2d_gib_per_s,
            ),
        )
        return self._choose(self._planner)

    def plan_tighter(self) -> Plan | None:
        """Take a plan with a lower peak than the one that is followed; None if there is none."""
        planner, chosen = self._planner, self.chosen
        if planner is None or chosen is None:
            return None
        least = planner.least()
        if chosen.peak_bytes <= least.peak_bytes:
            return None
        self._limit_bytes = max(TIGHTER * chosen.peak_bytes, least.peak_bytes)
        return self._choose(planner)

    def fall_back(self, fallback: Candidate) -> Plan:
        """Take :attr:`fallback`."""
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
            },
        )
