"""Policy ``auto``: measures the first micro-batches, plans, and goes on with the plan.

Until then everything is offloaded. The plan is the fastest that the planner finds within the
device's memory; where everything fits, hooks stay off. It is looked at again when a larger batch
comes, and beside what the step then measures: see ``auto_check`` and ``auto_correction``. With
several processes the first one plans, and the others take its plan.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_pyao.documents.plan import Plan
from hf_pyao.documents.profile import Profile
from hf_pyao.integrations.auto_check import (
    NUM_UNCOUNTED,
    Comparison,
    loses,
)
from hf_pyao.integrations.auto_correction import LEAST_TIMED, beside
from hf_pyao.integrations.auto_following import LARGER, PlanFollower
from hf_pyao.integrations.auto_phases import Phase, Phases
from hf_pyao.integrations.auto_planning import PlanMaker
from hf_pyao.integrations.auto_settings import AutoSettings
from hf_pyao.integrations.auto_unrecorded import is_unrecorded
from hf_pyao.integrations.lever_recording import LeverRecorder, num_hooks_in, room_for
from hf_pyao.integrations.lever_switch import LeverSwitch
from hf_pyao.integrations.model_copy import CopiedStep, ForwardWatch, SeenForward
from hf_pyao.integrations.plan_files import PlanFiles
from hf_pyao.integrations.rank_exchange import RankExchange, own_rank
from hf_pyao.integrations.step_recording import record_fake_step
from hf_pyao.planning.auto_plan import describe
from hf_pyao.planning.lever_choice import FIXED, LeverRoom
from hf_pyao.planning.plan_request import PlanRequest
from hf_pyao.runtime.engine import OffloadEngine
from hf_pyao.text import describe_error

logger = logging.getLogger(__name__)

PLAN_FILE = "pyao_plan.json"
"""Name of the plan in a checkpoint's folder."""


class AutoPolicy:
    """Gives an engine a plan when its first micro-batches have been measured.

    Args:
        engine: what follows the plan.
        device: where the model is.
        config: what it takes from the configuration.
        request: what binds its plans.
        identity: what tells the model.
        switch: sets the levers of plans.
        check_plan: refuses a plan that is for another model, by a ``PlanError``.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        device: torch.device,
        config: AutoSettings,
        request: PlanRequest,
        *,
        identity: Mapping[str, Any],
        switch: LeverSwitch,
        check_plan: Callable[[Plan], None],
    ) -> None:
        self._engine = weakref.ref(engine)
        self._device = device
        self._config = config
        self._room_given = request.room
        self._switch = switch
        self._files = PlanFiles(config, device, check_plan)
        self._watch: ForwardWatch | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._ear: RankExchange | None = None
        """Where the first process's next plan is heard; None in that process, and before any."""
        self._follower = PlanFollower(engine, device, config, request, self._files, switch)
        parameters = self._parameters_of_model()
        self._phases = Phases(
            lambda: Phase(
                PlanMaker(device, config, request, identity, parameters),
                Comparison(device, config.profile_steps),
            ),
            patience=2 * config.profile_steps,
        )
        self._num_elements = 0
        self._most_elements = 0
        """Of the largest batch since the first one that is measured."""
        self._looked_at: tuple[Plan, int, str] | None = None
        """The plan with which layers may run again, how many hooks the model had then, and why a
        layer did not run again."""
        self.say: Callable[[str], None] = lambda line: logger.info("%s", line)
        """Shows a line to the user."""
        self.cancel_profile: Callable[[], None] = lambda: None
        """Ends the measuring."""
        self.measure_anew: Callable[[], None] = lambda: None
        """Has the next micro-batches measured, for :meth:`profiled`."""

    @property
    def _maker(self) -> PlanMaker:
        return self._phases.now.maker

    @property
    def _comparison(self) -> Comparison:
        return self._phases.now.comparison

    @property
    def plan(self) -> Plan | None:
        """What was decided; None until then."""
        return self._follower.plan

    @property
    def summary(self) -> str:
        """What was decided, in one line; empty until then."""
        return self._follower.summary

    # ---- before the first forward --------------------------------------------------------------

    @property
    def profiles(self) -> bool:
        """True if micro-batches are to be measured."""
        return self.plan is None and not self.summary

    def decide_at_once(self) -> None:
        """Follow the plan that was kept, or do nothing on a CPU without a limit.

        Raises:
            ReportError: the file is no plan.
            PlanError: the plan contradicts itself, is for another model, or loses what may not be
                lost.
        """
        self._follower.decide_at_once()

    def follow(self, plan: Plan, how: str) -> None:
        """Follow *plan* from the next forward on, and time nothing.

        Raises:
            PlanError: it needs other levers than were given.
        """
        self._follower.follow(plan, how)  # first: it may refuse
        self._comparison.stop()
        self._phases.now.plan = plan

    def start(self, model: nn.Module, owner: object) -> None:
        """Watch what *model* is called with, until :meth:`end`."""
        self._model = weakref.ref(model)
        if self.plan is None and self.summary:
            return  # nothing will change
        self._watch = ForwardWatch(model, owner, self._before_forward)
        engine = self._engine()
        if self.profiles and engine is not None:
            self._comparison.begin(engine)

    def end(self) -> None:
        """Take everything off. Twice is fine."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.remove()
        self._comparison.stop()

    def _parameters_of_model(self) -> Callable[[], Iterable[nn.Parameter]]:
        """Return what returns the model's parameters; it holds neither the model nor this."""
        ref = weakref.ref(self)

        def parameters() -> Iterable[nn.Parameter]:
            auto = ref()
            model = None if auto is None or auto._model is None else auto._model()
            return () if model is None else model.parameters()

        return parameters

    # ---- planning ------------------------------------------------------------------------------

    def profiled(self, profile: Profile | None) -> None:
        """Plan for what was measured; before a forward."""
        self._comparison.end_of_fallback()
        if own_rank() != 0:  # the first process plans
            self._ear = self._ear or RankExchange("plan")
            return
        if profile is None or profile.program is None:
            self._plan_unrecorded(profile)
            return
        self._phases.planned()
        try:
            self._adopt(*self._plan_for_measured(profile))
        except Exception as error:  # no reason to end a training
            self._follower.go_on_without(f"no plan was found ({describe_error(error)})")
            logger.warning("%s", self.summary)
            self._maker.forget()
            self._tell(None)

    def _plan_for_measured(self, profile: Profile) -> tuple[Plan, str]:
        """Plan for the largest batch so far: with dynamic padding the first is one of many."""
        found = self._maker.plan(profile, self._num_elements, self._recorder(), self._room())
        if self._watch is None or self._most_elements <= LARGER * self._num_elements:
            return found
        return self._plan_for_larger(self._most_elements, self._watch.steps(is_largest=True))

    def _plan_unrecorded(self, profile: Profile | None) -> None:
        """Keep everything if it fits, without a recorded step; else go on as before."""
        found = None
        if profile is not None:
            found = self._maker.plan_unrecorded(profile, self._most_elements)
        if found is not None:
            plan, how = found
            self.follow(plan, how)
            self.say(self.summary)
            self._keep(plan)
            self._tell(plan)
            return
        why = "nothing was measured" if profile is None else profile.why_no_program
        self._follower.go_on_without(why)
        self.say(self.summary)
        self._tell(None)

    def _recorder(self) -> LeverRecorder | None:
        """Return what records the step with other levers."""
        if self._watch is None:
            return None
        return LeverRecorder(self._watch.steps(), self._config.layers)

    def _room(self) -> LeverRoom:
        """Return which levers may be chosen."""
        model = None if self._model is None else self._model()
        if model is None:
            return FIXED
        room, why = room_for(self._room_given, model, self._config.layers), self._switch.refused
        if room.segments and why:
            return dataclasses.replace(room, segments=False, why_no_segments=why)
        return room

    def measures_again(self) -> None:
        """Take note that what was measured is of no use; before a forward."""
        if self._watch is not None:
            self._watch.forget()
        engine = self._engine()
        if engine is not None:
            self._comparison.begin(engine)

    def _adopt(self, plan: Plan, why: str) -> None:
        """Follow *plan*, tell of it, and time it."""
        self.follow(plan, why)
        self.say(self.summary)
        self._keep(plan)
        self._tell(plan)
        engine = self._engine()
        if not self._maker.keeps_all and engine is not None:
            least = max(0, LEAST_TIMED - self._config.profile_steps)
            self._comparison.begin(engine, num_more=NUM_UNCOUNTED + least)

    def report(self) -> dict[str, Any]:
        """Return what the run's report holds: the plan, with what it measured; empty before it."""
        if self.plan is None:
            return {}
        figures = {**self.plan.figures, **self._comparison.report()}
        plan = dataclasses.replace(self.plan, figures=figures)
        return {"plan": plan.to_dict()}

    def _tell(self, plan: Plan | None) -> None:
        """Tell the other processes of a plan, or that there is none.

        A round is begun only when there is something to tell in it: others wait for each in turn.
        """
        RankExchange("plan").tell("" if plan is None else json.dumps(plan.to_dict()))

    def _keep(self, plan: Plan) -> None:
        """Keep the plan for the next run, which begins as this one did."""
        if self._phases.is_first:
            self._files.keep(plan)

    # ---- afterwards ----------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the plan, if there is one, for :meth:`resume`. Failing is told, and no more."""
        if self.plan is not None:
            self._files.save(self.plan, path)

    def resume(self, path: Path) -> None:
        """Follow the plan that :meth:`save` wrote, if it is there and for this run."""
        plan = None if self.plan is not None else self._files.in_checkpoint(path)
        if plan is None:
            return
        why = self._why_not_again(plan)
        if why:
            logger.warning("the plan in the checkpoint is not followed: %s", why)
            return
        self.cancel_profile()
        self.follow(plan, "the plan in the checkpoint")
        self.say(self.summary)

    def _before_forward(self, seen: SeenForward, *, is_first: bool) -> None:
        num_elements = 0 if self._watch is None else self._watch.num_elements()
        if is_first:
            self._num_elements = num_elements  # of the step that is recorded
            self._most_elements = 0
        self._most_elements = max(self._most_elements, num_elements)
        try:
            self._look_at_parameters()
            self._comparison.note_size(num_elements)
            if self._ear is not None:
                self._hear_of_plan(self._ear)
            elif self._maker.can_plan:
                self._look_again(num_elements)
            elif is_unrecorded(self.plan) and not self._follower.holds(num_elements):
                self._measure_anew("batches are larger than those that were measured")
            else:
                self._follower.check_size(num_elements)
            self._look_at_layers()
        except Exception as error:  # no reason to end a training
            logger.warning("policy 'auto' keeps its plan: %s", describe_error(error))
            self._maker.forget()
            self._comparison.stop()
            self._follower.check_size(num_elements)

    def _hear_of_plan(self, ear: RankExchange) -> None:
        text = ear.heard_from(0)
        if text is None:
            return
        self._ear = RankExchange("plan")  # for the next one
        if not text:
            if self.plan is None:
                self._follower.go_on_without("the first process has no plan")
            return
        plan = Plan.from_dict(json.loads(text))
        if not self._phases.are_of(plan):
            return
        why = self._why_not_again(plan)
        if why:
            logger.warning("policy 'auto' does not follow the first process's plan: %s", why)
            return
        self.follow(plan, "the first process's plan")

    def _why_not_again(self, plan: Plan) -> str:
        """Say why layers may not run again as *plan* has it; empty if they may, or do not.

        It was made for the model as it was: by another process, in another run, or before a hook
        came. What the user asked for is done all the same.
        """
        if not plan.levers.get("checkpoint_every"):
            return ""
        if "checkpoint_every" not in self._config.given.free:
            return ""
        room = self._room()
        return "" if room.segments else f"layers would run again, and {room.why_no_segments}"

    def _look_at_layers(self) -> None:
        """Plan for layers that run once where they may run again no longer; before a forward."""
        plan, model = self.plan, None if self._model is None else self._model()
        if plan is None or model is None or not plan.levers.get("checkpoint_every"):
            return
        seen = (plan, num_hooks_in(model), self._switch.refused)
        before = self._looked_at
        if before is not None and before[0] is plan and before[1:] == seen[1:]:
            return
        self._looked_at = seen
        why = self._why_not_again(plan)
        if not why:
            return
        logger.warning("policy 'auto' does not go on with its plan: %s", why)
        if self._maker.can_plan and self._ear is None:
            self._adopt(self._maker.plan_in(self._room()), "of layers that run once")
        else:
            self._measure_anew("its plan is not to be followed any more")

    def _look_at_parameters(self) -> None:
        """Go over to another plan, or to measuring, where others are trained than before."""
        model = None if self._model is None else self._model()
        if model is None or self._watch is None:
            return
        if not self._phases.has_begun:
            self._phases.begin(model, self._watch)
            self._phases.now.plan = self.plan
            if self.plan is not None and not self._phases.are_of(self.plan):
                self._measure_anew()
        elif self._phases.is_over():
            self._comparison.stop()
            self._phases.go_over()
            self.cancel_profile()
            plan = self._phases.now.plan
            if plan is None:
                self._measure_anew()
            else:
                self.follow(plan, "the plan for the parameters that are trained again")
                self.say(self.summary)

    def _measure_anew(self, why: str = "other parameters are trained than it planned for") -> None:
        """Offload everything, and make a plan of what the next micro-batches take."""
        engine = self._engine()
        if engine is None or self._watch is None:
            return
        self._follower.begin_anew()
        self._phases.now.plan = None
        if not self._phases.may_measure():
            self._follower.go_on_without(
                "parameters were frozen and thawed too often for a plan each time"
            )
            logger.warning("%s.", self.summary)
            return
        self.say(f"policy 'auto' measures anew: {why}.")
        self._watch.forget()
        self._comparison.begin(engine)
        self.measure_anew()

    def _look_again(self, num_elements: int) -> None:
        if not self._follower.holds(num_elements):
            assert self._watch is not None
            was = self._maker.num_elements
            plan, how = self._plan_for_larger(num_elements, self._watch.steps(is_newest=True))
            self._adopt(plan, f"for batches of {num_elements} elements instead of {was}; {how}")
        elif self._comparison.is_done:
            self._compare()

    def _plan_for_larger(
        self, num_elements: int, steps: Callable[[], CopiedStep]
    ) -> tuple[Plan, str]:
        """Record the step of a larger batch, take times in proportion, and plan for it."""
        recorded, _ = record_fake_step(
            steps(), levers=self._config.given.levers, layers=self._config.layers
        )
        recorder = LeverRecorder(steps, self._config.layers)
        return self._maker.plan_larger(recorded, num_elements, recorder, self._room())

    def _compare(self) -> None:
        """Set what the plan came to beside what was predicted: plan anew, or drop it."""
        comparison, maker = self._comparison, self._maker
        comparison.end_of_plan(maker.expected())
        if not comparison.plan:
            return
        logger.info("policy 'auto': %s.", beside(comparison.plan, maker.expected()))
        if not self._correct():
            self._drop_if_it_loses()

    def _correct(self) -> bool:
        """Plan anew, once for each cause, where times are off; say whether another plan came."""
        comparison, maker = self._comparison, self._maker
        # Larger batches, for which the plan holds too, take longer.
        most = LARGER * maker.num_elements
        timed = [each for each in comparison.plan if each.num_elements <= most]
        found = self._phases.now.corrector.find(
            timed, maker.num_elements, maker.expected, maker.copies_ms
        )
        if found is None:
            return False
        if found.correction.compute != 1.0:
            comparison.speed_has_changed()
        plan, is_another = maker.plan_corrected(found.correction)
        if is_another:
            comparison.exchanged()
            self._adopt(plan, found.words)
            return True
        self.follow(plan, f"{found.words}; no other plan would be faster")
        self.say(self.summary)
        self._keep(plan)
        self._tell(plan)
        return False

    def _drop_if_it_loses(self) -> None:
        """Go back to what was done before, or to offloading everything, if that was faster."""
        comparison, maker = self._comparison, self._maker
        for fallback, measured, name in (
            (maker.before, comparison.before, "the plan before"),
            (maker.fallback, comparison.fallback, "offloading everything"),
        ):
            lost = None if fallback is None else loses(comparison.plan, measured)
            if fallback is None or lost is None:
                continue
            self.say(
                f"policy 'auto' drops its plan, which takes {lost[0]:.1f} ms or more where "
                f"{name} took {lost[1]:.1f}."
            )
            plan = maker.fall_back(fallback)
            self.follow(plan, f"its fallback, {name}")
            self._keep(plan)
            self._tell(plan)
            return

    # ---- out of memory -------------------------------------------------------------------------

    def tighter(self, error: BaseException) -> str | None:
        """Plan for less memory, since the device ran out of it.

        Returns:
            What is done from now on; None if there is nothing tighter.
        """
        if self._engine() is None:
            return None
        try:
            plan = self._maker.plan_tighter()
            if plan is None:
                return None
            self._adopt(plan, "after the device ran out of memory")
        except Exception as failure:  # there is more that can be done than to plan
            logger.warning("no tighter plan was found: %s", describe_error(failure))
            return None
        return describe(plan)

    def stop_planning(self) -> None:
        """Plan no more: something else decides from now on."""
        self.cancel_profile()
        self.end()
        self._maker.forget()
        self._follower.give_way()
