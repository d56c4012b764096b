"""Policy ``auto``: measures the first micro-batches, plans, and goes on with the plan.

Until then everything is offloaded. The plan is the fastest that the planner finds within the
device's memory; where everything fits, hooks stay off. The plan is looked at again when a larger
batch comes, and when the step has been timed under it: see ``plans.plan_timing`` and
``plans.correction``. With several processes the first one plans, and the others take its plan.

The machine in ``hf_pyao.auto.machine`` decides. This module tells it what happens to the model, and
``performer`` performs its actions.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_pyao.auto.install.lever_switch import LeverSwitch
from hf_pyao.auto.machine import events as on
from hf_pyao.auto.machine.driver import Driver
from hf_pyao.auto.machine.states import Mode, Ready
from hf_pyao.auto.measuring import Measuring
from hf_pyao.auto.performer import AutoActions
from hf_pyao.auto.plans.batch_fit import LARGER, NAME, holds, ready_of
from hf_pyao.auto.plans.draft import Draft
from hf_pyao.auto.plans.kept_plans import PlanFiles
from hf_pyao.auto.plans.plan_timing import measured_figures
from hf_pyao.auto.plans.planning import PlanMaker
from hf_pyao.auto.plans.settings import AutoSettings
from hf_pyao.auto.plans.trained import mark_of
from hf_pyao.auto.ranks.agreement import Agreement
from hf_pyao.auto.ranks.plan_rounds import LATE
from hf_pyao.auto.recording.forward_watch import ForwardWatch
from hf_pyao.auto.recording.seen_forward import SeenForward
from hf_pyao.auto.view import ModelView
from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.errors import warn
from hf_pyao.metrics import format_bytes
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.hardware.device_limit import why_unlimited
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.ranks import process_rank
from hf_pyao.text import describe_error

logger = logging.getLogger(__name__)

PLAN_FILE = "pyao_plan.json"
"""Name of the plan in a checkpoint's folder."""

_ENDED = (Mode.OFF, Mode.KEEPING, Mode.TIGHTENED, Mode.DETACHED)
"""Modes that no forward changes."""


class AutoPolicy:
    """Tells the machine what happens to one model under policy ``auto``.

    Args:
        engine: what follows the plan.
        driver: of the machine.
        device: where the model is.
        settings: what it takes from the configuration.
        request: what binds its plans.
        identity: what tells the model.
        switch: sets the levers of plans.
        check_plan: refuses a plan that is for another model, by a ``PlanError``.
        measurer: measures micro-batches.
        num_sampled: says how many forwards were checked for second runs.
        num_resident: says how many layers' frozen weights are on the device; None: all.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        driver: Driver,
        device: torch.device,
        settings: AutoSettings,
        request: PlanRequest,
        *,
        identity: dict[str, Any],
        switch: LeverSwitch,
        check_plan: Callable[[Plan], None],
        measurer: Measuring,
        num_sampled: Callable[[], int] = lambda: 0,
        num_resident: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._device = device
        self._settings = settings
        self._request = request
        self.driver = driver
        """Whose ``state`` is all that was decided."""
        self._files = PlanFiles(settings, device, check_plan)
        self._view = ModelView(settings, request.room, switch)
        parameters = self._view.parameters
        self._maker = PlanMaker(device, settings, request, identity, parameters, num_resident)
        self._agreement = Agreement(LARGER, on_refused=self._view.forget_others_batch)
        self._actions = AutoActions(
            engine,
            device,
            settings,
            self._maker,
            self._files,
            self._view,
            self._agreement,
            measurer,
            num_sampled,
        )
        driver.perform_with(self._actions.perform)

    @property
    def plan(self) -> Plan | None:
        """The plan that is followed; None if none is."""
        ready = self.driver.state.now.ready
        return None if ready is None else ready.plan

    @property
    def draft(self) -> Draft | None:
        """The plan with what the next one can be made from; None if it cannot be made anew."""
        draft: Draft | None = self.driver.state.now.draft
        return draft

    @property
    def summary(self) -> str:
        """What was decided, in one line, and what was measured beside; empty until then."""
        summary, more_bytes = self.driver.state.summary, self._maker.unpredicted_bytes
        if not summary or not more_bytes:
            return summary
        return (
            f"{summary.removesuffix('.')}; the device's memory was measured to grow by "
            f"{format_bytes(more_bytes)} more than predicted, which is left free."
        )

    def measured_memory(self) -> str:
        """Say what of the device's memory was measured, beside what was predicted; or nothing."""
        return str(self._maker.growth)

    def show_on(self, say: Callable[[str], None]) -> None:
        """Show what is decided by *say*; it is logged otherwise."""
        self._actions.show_on(say)

    # ---- before the first forward --------------------------------------------------------------

    @property
    def measures(self) -> bool:
        """True while micro-batches are to be measured."""
        return self.driver.state.mode is Mode.MEASURING

    def decide_at_once(self) -> None:
        """Follow the plan that was kept, do nothing on a CPU without a limit, or measure.

        Raises:
            ReportError: the file is no plan.
            PlanError: the plan contradicts itself, is for another model, or loses what may not be
                lost.
        """
        kept = self._files.kept()
        if kept is not None:
            ready = ready_of(kept, self._settings.given)
            self.driver.send(on.PlanGiven(ready, f"the plan of {self._files.path}"))
        elif self._settings.device_limit(self._device) is None:
            # A profile that is asked for is made first: of everything offloaded.
            keeps_all = self._device.type == "cpu" and not self._settings.makes_profile
            label = self._settings.label("device_memory_gib")
            summary = f"policy {NAME!r} {why_unlimited(self._device, label)}"
            self.driver.send(on.Unlimited(summary, keeps_all))
        else:
            self.driver.send(on.Starts())

    def follow(self, plan: Plan, how: str) -> None:
        """Follow *plan* from the next forward on, and measure nothing.

        Raises:
            PlanError: it needs other levers than were given.
        """
        self.driver.send(on.PlanGiven(ready_of(plan, self._settings.given), how))

    def start(self, model: nn.Module, owner: object) -> None:
        """Watch what *model* is called with, until :meth:`end`."""
        if self.driver.state.mode not in _ENDED:
            self._view.start(model, ForwardWatch(model, owner, self._before_forward))

    def end(self) -> None:
        """Take everything off. Twice is fine."""
        self._leave()
        self.driver.send(on.Detached())

    # ---- what was measured ---------------------------------------------------------------------

    def profiled(self, profile: Profile | None) -> None:
        """Take what was measured; before a forward."""
        if process_rank().is_told:  # the first process plans
            self._send(on.Profiled(None, is_recorded=False, is_first_rank=False))
            return
        self._actions.note_recorded()
        self._agreement.is_before_next()
        is_recorded = profile is not None and profile.program is not None
        self._send(on.Profiled(profile, is_recorded))

    def measured_nothing(self) -> None:
        """Report that what was measured is of no use, and is measured again."""
        self._send(on.MeasuredNothing())

    def _send(self, event: on.Event) -> None:
        try:
            self.driver.send(event)
        except Exception as error:  # no reason to end a training
            self.driver.send(on.Failed(describe_error(error)))

    # ---- before each forward -------------------------------------------------------------------

    def _before_forward(self, seen: SeenForward, *, is_first: bool) -> None:
        num_elements = self._view.note_batch(is_first=is_first)
        self._agreement.begin()
        for other in self._agreement.batches_of_others(num_elements, self._view.newest_sizes):
            self._view.note_others_batch(*other)
        decided = self._agreement.decided(self.driver.state.mode)
        if decided is not None:
            self._send(decided)
        if self._agreement.is_pending:
            return  # all goes on as it was, until others have answered
        if self.driver.state.mode is Mode.RECORDING:
            self._send(on.Interrupted())
        try:
            self._tell_of_forward(num_elements)
        except Exception as error:  # no reason to end a training
            self.driver.send(on.Failed(describe_error(error)))
            self._tell_of_size(num_elements)
        if self.driver.state.mode in _ENDED:
            self._leave()

    def _leave(self) -> None:
        self._view.end()
        self._agreement.leave()

    def _tell_of_forward(self, num_elements: int) -> None:
        driver = self.driver
        self._tell_of_parameters()
        self._actions.note_size(num_elements)
        heard = self._agreement.hear(self._judged)
        if heard is not None:
            driver.send(heard)
        self._tell_of_size(num_elements)
        timed = self._actions.timed(driver.state)
        if timed is not None:
            driver.send(timed)
        plan = self.plan
        why = "" if plan is None else self._view.why_no_longer(plan)
        if why:
            driver.send(on.Refused(why))

    def _tell_of_size(self, num_elements: int) -> None:
        plan = self.plan
        num_elements = max(num_elements, self._view.others_elements)
        fits = plan is None or holds(plan, num_elements, self._request.host_limit_now_bytes)
        self.driver.send(on.Forward(num_elements, fits))

    def _tell_of_parameters(self) -> None:
        found = self._view.trained_key()
        if found is not None:
            key, has_changed = found
            self.driver.send(on.Trained(key, has_changed, self._is_of(key, self.plan)))

    def _is_of(self, key: bytes | None, plan: Plan | None) -> bool:
        """Say whether *plan* is for the parameters that are trained, as far as it tells."""
        if plan is None or key is None or plan.facts.trained is None:
            return True
        return plan.facts.trained == mark_of(key)

    def _judged(self, text: str) -> tuple[Ready | None, str]:
        """Return a plan as one that may be followed here, or why it cannot be."""
        if self.driver.state.mode is Mode.MEASURING:
            return None, LATE  # it is too early here, which comes to the same
        try:
            plan = Plan.from_dict(json.loads(text))
            if not self._is_of(self.driver.state.key, plan):
                return None, "other parameters are trained there"
            why = self._view.why_not_again(plan)
            return (None, why) if why else (ready_of(plan, self._settings.given), "")
        except Exception as error:  # no reason to end a training
            return None, describe_error(error)

    # ---- reports and checkpoints ---------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return what the run's report holds: the plan, with what it measured, and transitions."""
        found: dict[str, Any] = {"transitions": self.driver.transitions()}
        if self.plan is not None:
            times = self.driver.state.now.times
            figures = {
                **self.plan.figures,
                **measured_figures(times.plan, times.expected),
                "unpredicted_bytes": self._maker.unpredicted_bytes,
                **self._maker.growth.figures(),
            }
            found["plan"] = dataclasses.replace(self.plan, figures=figures).to_dict()
        return found

    def save(self, path: Path) -> None:
        """Write the plan, if there is one, for :meth:`resume`. Failing is told, and no more."""
        if self.plan is not None:
            self._files.save(self.plan, path)

    def resume(self, path: Path) -> None:
        """Follow the plan that :meth:`save` wrote, if it is there and for this run."""
        plan = None if self.plan is not None else self._files.in_checkpoint(path)
        if plan is None:
            return
        why = self._view.why_not_again(plan)
        if why:
            warn(
                logger,
                "checkpoint-plan-ignored",
                "the plan in the checkpoint is not followed: %s",
                why,
            )
            return
        self.follow(plan, "the plan in the checkpoint")
        self._actions.say(self.summary)
