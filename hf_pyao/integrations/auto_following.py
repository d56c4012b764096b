"""What policy ``auto`` has an engine do: a plan, everything offloaded, or nothing."""

from __future__ import annotations

import logging
import weakref

import torch

from hf_pyao.documents.plan import KEEP, Plan
from hf_pyao.integrations.auto_settings import AutoSettings
from hf_pyao.integrations.device_limit import device_limit, release_cached, why_unlimited
from hf_pyao.integrations.lever_switch import LeverSwitch
from hf_pyao.integrations.plan_files import PlanFiles
from hf_pyao.planning.auto_plan import describe
from hf_pyao.planning.plan_levers import levers_of_plan
from hf_pyao.planning.plan_policy import PlanPolicy
from hf_pyao.planning.plan_request import PlanRequest
from hf_pyao.runtime.engine import OffloadEngine
from hf_pyao.runtime.policy import KeepEverything

logger = logging.getLogger(__name__)

NAME = "auto"

LARGEST_GROWTH = 2.0
"""Largest power of a batch's elements that memory grows with: attention scores grow so."""

LARGER = 1.02
"""By how much more elements a batch must have than the one planned for to be planned for anew."""


class PlanFollower:
    """Gives an engine its policy, and knows what is followed and why.

    Args:
        engine: whose policy it is; held weakly.
        device: where the model is.
        config: what policy ``auto`` takes from the configuration.
        request: what it binds.
        files: where plans are kept.
        switch: sets the levers of plans.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        device: torch.device,
        config: AutoSettings,
        request: PlanRequest,
        files: PlanFiles,
        switch: LeverSwitch,
    ) -> None:
        self._engine = weakref.ref(engine)
        self._without_plan = engine.policy
        """Offloads everything, but for what the configuration keeps or recomputes."""
        self._device = device
        self._config = config
        self._request = request
        self._files = files
        self._switch = switch
        self.plan: Plan | None = None
        """What was decided; None until then, and where nothing is to be followed any more."""
        self.summary = ""
        """What was decided, in one line; empty until then."""

    def decide_at_once(self) -> None:
        """Follow the plan that was kept, or do nothing on a CPU without a limit.

        Raises:
            ReportError: the file is no plan.
            PlanError: the plan contradicts itself, is for another model, or loses what may not be
                lost.
        """
        kept = self._files.kept()
        if kept is not None:
            self.follow(kept, f"the plan of {self._files.path}")
        elif device_limit(self._device, self._config.device_memory_gib) is None:
            label = self._config.label("device_memory_gib")
            self.summary = f"policy {NAME!r} {why_unlimited(self._device, label)}"
            engine = self._engine()
            # A profile that is asked for is made first: of everything offloaded.
            if self._device.type == "cpu" and not self._config.makes_profile and engine is not None:
                engine.use(KeepEverything(NAME))

    def follow(self, plan: Plan, how: str) -> None:
        """Follow *plan* from the next forward on, with its levers.

        Raises:
            PlanError: it needs other levers than were given.
        """
        engine = self._engine()
        if engine is None:
            return
        self._switch.set(levers_of_plan(plan, self._config.given))
        release_cached(self._device)  # the plan fits segments that are its own
        self.plan = plan
        self.summary = f"policy {NAME!r} ({how}): {describe(plan)}"
        if plan.otherwise == KEEP and all(slot.action == KEEP for slot in plan.slots):
            engine.use(KeepEverything(NAME))
            return
        window_bytes = plan.facts.window_bytes
        if window_bytes and self._request.may_shrink_window:
            engine.set_window(window_bytes)
        engine.use(PlanPolicy(plan, self._request.min_bytes, NAME))

    def check_size(self, num_elements: int) -> None:
        """Offload everything where the plan, which cannot be made anew, is for smaller batches."""
        planned = None if self.plan is None else self.plan.facts.num_elements
        engine = self._engine()
        if engine is None or planned is None or self.holds(num_elements):
            return
        self.plan = None
        engine.use(self._without_plan)
        self.summary = (
            f"policy {NAME!r} offloads everything: its plan is for batches of {planned} "
            f"elements, and one of {num_elements} came. Delete the plan to have it made anew"
        )
        logger.warning("%s.", self.summary)

    def holds(self, num_elements: int) -> bool:
        """Say whether the plan that is followed fits for batches of *num_elements* too.

        A larger batch needs at most as many times more as its square is larger, weights and what is
        beside the step apart: scores of attention that is written out grow that fast, and nothing
        grows faster. Where two sizes were recorded, their growth is known (``growth_exponent``).
        Where that fits, on the device and on the host, no other plan is needed; where the plan does
        not fit as it is, none is known that does.
        """
        if self.plan is None:
            return True
        facts = self.plan.facts
        planned, limit_bytes = facts.num_elements, facts.limit_bytes
        if limit_bytes is None or not planned or num_elements <= LARGER * planned:
            return True
        exponent = LARGEST_GROWTH if facts.growth_exponent is None else facts.growth_exponent
        growth = (num_elements / planned) ** exponent
        fixed_bytes = (facts.resident_bytes or 0) + (facts.beside_bytes or 0)
        needed = facts.total_bytes
        grown = fixed_bytes + (needed - fixed_bytes) * growth
        host_bytes = (facts.host_bytes or 0) * growth
        fits = grown <= limit_bytes and host_bytes <= self._request.host_limit_bytes
        return fits or needed > limit_bytes

    def begin_anew(self) -> None:
        """Offload everything until there is a plan again."""
        engine = self._engine()
        if engine is None:
            return
        self.plan, self.summary = None, ""
        self._switch.set(self._switch.configured)  # as what is measured is taken to run
        if self._request.window_bytes is not None and self._request.may_shrink_window:
            engine.set_window(self._request.window_bytes)
        engine.use(self._without_plan)

    def go_on_without(self, why: str) -> None:
        """Take note that there is no plan: everything is offloaded, as before."""
        self.summary = f"policy {NAME!r} goes on offloading everything: {why}"

    def give_way(self) -> None:
        """Take note that something else decides from now on."""
        self.plan = None
        self.summary = f"policy {NAME!r} has given way: the device ran out of memory"
