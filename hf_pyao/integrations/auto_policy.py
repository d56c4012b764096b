"""Policy ``auto``: measures the first micro-batches, plans, and goes on with the plan.

Until then everything is offloaded. The plan is the fastest that the planner finds within the
device's memory; where everything fits, hooks stay off. It is looked at again when a larger batch
comes, and once beside what the step then measures: see ``auto_check``. With several processes the
first one plans, and the others take its plan.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_pyao.config import PyAOConfig
from hf_pyao.errors import PyAOError
from hf_pyao.integrations.auto_check import PlanCheck, TimedMicroBatch, loses, typical
from hf_pyao.integrations.auto_planning import PlanMaker
from hf_pyao.integrations.device_limit import device_limit
from hf_pyao.integrations.model_copy import ForwardWatch, SeenForward
from hf_pyao.integrations.rank_exchange import RankExchange
from hf_pyao.integrations.run_record import is_main_process
from hf_pyao.integrations.step_recording import record_fake_step
from hf_pyao.levers import Levers
from hf_pyao.planning.auto_plan import describe
from hf_pyao.planning.plan import KEEP, Plan, PlanPolicy
from hf_pyao.planning.plan_request import PlanRequest
from hf_pyao.report.profile_report import Profile
from hf_pyao.runtime.engine import OffloadEngine
from hf_pyao.runtime.policy import KeepEverything, OffloadAll
from hf_pyao.stores import HostPool
from hf_pyao.text import describe_error

logger = logging.getLogger(__name__)

NAME = "auto"

PLAN_FILE = "pyao_plan.json"
"""Name of the plan in a checkpoint's folder."""

LARGER = 1.02
"""By how much more elements a batch must have than the one planned for to be planned for anew."""


class AutoPolicy:
    """Gives an engine a plan when its first micro-batches have been measured.

    Args:
        engine: what follows the plan.
        device: where the model is.
        config: what binds the plan.
        pool: host memory.
        identity: what tells the model.
        check_plan: refuses a plan that is for another model, by a ``PlanError``.
        recomputed_paths: what ``recompute_modules`` stand for in a layer.
        is_link_shared: the window is another model's too.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        device: torch.device,
        config: PyAOConfig,
        pool: HostPool,
        *,
        identity: Mapping[str, Any],
        check_plan: Callable[[Plan], None],
        recomputed_paths: tuple[str, ...] = (),
        is_link_shared: bool = False,
    ) -> None:
        self._engine = weakref.ref(engine)
        self._device = device
        self._config = config
        self._request = PlanRequest.of_config(
            config,
            recomputed_paths=recomputed_paths,
            host_limit_bytes=pool.capacity_bytes or math.inf,
            is_link_shared=is_link_shared,
        )
        self._check_plan = check_plan
        self._plan_path = None if config.plan is None else Path(os.path.abspath(config.plan))
        self._watch: ForwardWatch | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._exchange: RankExchange | None = None
        self._maker = PlanMaker(device, config, self._request, identity, self._parameters)
        self._num_elements = 0
        self._all_check: PlanCheck | None = None
        self._all_timed: Sequence[TimedMicroBatch] = ()
        self._check: PlanCheck | None = None
        self._timed: Sequence[TimedMicroBatch] = ()
        self.say: Callable[[str], None] = lambda line: logger.info("%s", line)
        """Shows a line to the user."""
        self.cancel_profile: Callable[[], None] = lambda: None
        """Ends the measuring."""
        self.plan: Plan | None = None
        """What was decided; None until then."""
        self.summary = ""
        """What was decided, in one line; empty until then."""

    # ---- before the first forward --------------------------------------------------------------

    @property
    def profiles(self) -> bool:
        """True if micro-batches are to be measured."""
        return self.plan is None and not self.summary

    def decide_at_once(self) -> None:
        """Follow the plan that was kept, or do nothing on a CPU without a limit.

        Raises:
            ReportError: the file is no plan.
            PlanError: the plan contradicts itself.
        """
        if self._plan_path is not None and self._plan_path.exists():
            self.follow(Plan.from_json_file(self._plan_path), f"the plan of {self._plan_path}")
        elif device_limit(self._device, self._config.device_memory_gib) is None:
            self.summary = self._why_unlimited()
            engine = self._engine()
            # A profile that is asked for is made first: of everything offloaded.
            if self._device.type == "cpu" and self._config.profile is None and engine is not None:
                engine.use(KeepEverything(NAME))

    def follow(self, plan: Plan, how: str) -> None:
        """Follow *plan* from the next forward on."""
        engine = self._engine()
        if engine is None:
            return
        self.plan = plan
        self.summary = f"policy 'auto' ({how}): {describe(plan)}"
        if plan.otherwise == KEEP and all(slot.action == KEEP for slot in plan.slots):
            engine.use(KeepEverything(NAME))
            return
        window_bytes = int(plan.figures.get("window_bytes", 0))
        if window_bytes and self._request.may_shrink_window:
            engine.set_window(window_bytes)
        engine.use(PlanPolicy(plan, self._request.min_bytes, NAME))

    def _why_unlimited(self) -> str:
        label = self._config.label("device_memory_gib")
        if self._device.type == "cpu":
            return (
                "policy 'auto' offloads nothing: on a CPU there is no device memory to free. Give "
                f"{label} to plan for a device of that size, or choose policy 'all'"
            )
        return (
            f"policy 'auto' offloads everything: how much memory {self._device} has is not known. "
            f"Give {label}"
        )

    def start(self, model: nn.Module, owner: object) -> None:
        """Watch what *model* is called with, until :meth:`end`."""
        self._model = weakref.ref(model)
        if self.plan is None and self.summary:
            return  # nothing will change
        self._watch = ForwardWatch(model, owner, self._before_forward)
        engine = self._engine()
        if self.profiles and engine is not None:
            self._all_check = PlanCheck(engine, self._device, self._config.profile_steps)
            self._all_check.start()

    def end(self) -> None:
        """Take everything off. Twice is fine."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.remove()
        self._stop_checks()

    def _parameters(self) -> Iterable[nn.Parameter]:
        model = None if self._model is None else self._model()
        return () if model is None else model.parameters()

    # ---- planning ------------------------------------------------------------------------------

    def profiled(self, profile: Profile | None) -> None:
        """Plan for what was measured; before a forward."""
        self._exchange = RankExchange("plan")
        all_check = self._all_check
        self._stop_checks()
        if self._exchange.rank != 0:
            return  # the first process plans
        if profile is None or profile.program is None:
            why = "nothing was measured" if profile is None else profile.why_no_program
            self.summary = f"policy 'auto' goes on offloading everything: {why}"
            self.say(self.summary)
            self._exchange.tell("")
            return
        try:
            self._all_timed = [] if all_check is None else all_check.result()
            self._adopt(*self._maker.plan(profile, self._num_elements))
        except Exception as error:  # no reason to end a training
            self.summary = (
                f"policy 'auto' goes on offloading everything: no plan was found "
                f"({describe_error(error)})"
            )
            logger.warning("%s", self.summary)
            self._exchange.tell("")

    def measures_again(self) -> None:
        """Take note that what was measured is of no use; before a forward."""
        if self._watch is not None:
            self._watch.forget()
        engine = self._engine()
        if engine is not None:
            self._stop_checks()
            self._all_check = PlanCheck(engine, self._device, self._config.profile_steps)
            self._all_check.start()

    def _adopt(self, plan: Plan, why: str) -> None:
        """Follow *plan*, tell of it, and time it."""
        self.follow(plan, why)
        self.say(self.summary)
        self._keep_plan()
        if self._exchange is not None:
            self._exchange.tell(json.dumps(plan.to_dict()))
        self._stop_checks()
        engine = self._engine()
        if not self._maker.keeps_all and engine is not None:
            self._check = PlanCheck(engine, self._device, self._config.profile_steps + 1)
            self._check.start()

    def _keep_plan(self) -> None:
        if self.plan is None or self._plan_path is None or not is_main_process():
            return
        try:
            self.plan.to_json_file(self._plan_path)
        except PyAOError as error:  # no reason to end a training
            logger.warning("the plan is not kept: %s", error)

    def report(self) -> dict[str, Any]:
        """Return what the run's report holds: the plan, with what it measured; empty before it."""
        if self.plan is None:
            return {}
        plan = self.plan
        if self._timed:
            found = typical(self._timed)
            measured = {
                "measured_layers_ms": found.layers_ms,
                "measured_stall_ms": found.stall_ms,
            }
            plan = dataclasses.replace(plan, figures={**plan.figures, **measured})
        return {"plan": plan.to_dict()}

    # ---- afterwards ----------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the plan, if there is one, for :meth:`resume`. Failing is told, and no more."""
        if self.plan is None:
            return
        try:
            self.plan.to_json_file(path)
        except PyAOError as error:  # no reason to end a training
            logger.warning("the plan is not saved with the checkpoint: %s", error)

    def resume(self, path: Path) -> None:
        """Follow the plan that :meth:`save` wrote, if it is there and of this model."""
        if not path.is_file() or self.plan is not None:
            return
        try:
            plan = Plan.from_json_file(path)
            self._check_plan(plan)
        except PyAOError as error:
            logger.warning("the plan in the checkpoint is not followed: %s", error)
            return
        self.cancel_profile()
        self.follow(plan, "the plan in the checkpoint")
        self.say(self.summary)

    def _before_forward(self, seen: SeenForward, *, is_first: bool) -> None:
        num_elements = 0 if self._watch is None else self._watch.num_elements()
        if is_first:
            self._num_elements = num_elements  # of the step that is recorded
        for check in (self._all_check, self._check):
            if check is not None:
                check.num_elements = num_elements
        try:
            if self._exchange is not None and self._exchange.rank != 0:
                self._hear_of_plan()
            elif self._maker.can_plan:
                self._look_again(num_elements)
            elif self.plan is not None:
                self._check_size(self.plan, num_elements)
        except Exception as error:  # no reason to end a training
            logger.warning("policy 'auto' keeps its plan: %s", describe_error(error))
            self._maker.forget()
            if self.plan is not None:
                self._check_size(self.plan, num_elements)

    def _hear_of_plan(self) -> None:
        assert self._exchange is not None
        text = self._exchange.heard_from(0)
        if text is None:
            return
        self._exchange = RankExchange("plan")  # for the next one
        if text:
            self.follow(Plan.from_dict(json.loads(text)), "the first process's plan")

    def _look_again(self, num_elements: int) -> None:
        if num_elements > LARGER * self._maker.num_elements:
            self._plan_for_larger(num_elements)
        elif self._check is not None and self._check.is_done:
            self._compare(self._check)

    def _check_size(self, plan: Plan, num_elements: int) -> None:
        """Offload everything where a plan that cannot be made anew is for smaller batches."""
        planned = plan.figures.get("num_elements")
        engine = self._engine()
        if engine is None or planned is None or num_elements <= LARGER * planned:
            return
        self.plan = None
        engine.use(self.everything_offloaded())
        self.summary = (
            f"policy 'auto' offloads everything: its plan is for batches of {planned:.0f} "
            f"elements, and one of {num_elements} came. Delete the plan to have it made anew"
        )
        logger.warning("%s.", self.summary)

    def _plan_for_larger(self, num_elements: int) -> None:
        """Record the step of the larger batch, take times in proportion, and plan for it."""
        watch = self._watch
        assert watch is not None
        was = self._maker.num_elements
        recorded, _ = record_fake_step(
            watch.step(is_newest=True), levers=Levers.of(self._config), layers=self._config.layers
        )
        self._exchange = RankExchange("plan")
        plan, how = self._maker.plan_larger(recorded, num_elements)
        self._adopt(plan, f"for batches of {num_elements} elements instead of {was}; {how}")

    def _compare(self, check: PlanCheck) -> None:
        """Set what the plan came to beside what was predicted; drop it if it loses."""
        self._stop_checks()
        chosen = self._maker.chosen
        assert chosen is not None
        timed = self._timed = check.result()
        if not timed:
            return
        found = typical(timed)
        logger.info(
            "policy 'auto': a micro-batch takes %.1f ms in the layers, %.1f of them waiting for "
            "copies; %.1f and %.1f were predicted for the step.",
            found.layers_ms,
            found.stall_ms,
            chosen.step_ms,
            chosen.timed.stall_forward_ms + chosen.timed.stall_backward_ms,
        )
        fallback, lost = self._maker.fallback, loses(timed, self._all_timed)
        if fallback is not None and lost is not None:
            self.say(
                f"policy 'auto' drops its plan, which takes {lost[0]:.1f} ms or more where "
                f"offloading everything took {lost[1]:.1f}."
            )
            self.follow(self._maker.fall_back(fallback), "its fallback")
            self._keep_plan()

    def _stop_checks(self) -> None:
        checks = self._check, self._all_check
        self._check = self._all_check = None
        for check in checks:
            if check is not None:
                check.stop()

    # ---- out of memory -------------------------------------------------------------------------

    def tighter(self, error: BaseException) -> str | None:
        """Plan for less memory, since the device ran out of it.

        Returns:
            What is done from now on; None if there is nothing tighter.
        """
        if self._engine() is None:
            return None
        plan = self._maker.plan_tighter()
        if plan is None:
            return None
        self._adopt(plan, "after the device ran out of memory")
        return describe(plan)

    def stop_planning(self) -> None:
        """Plan no more: something else decides from now on."""
        self.cancel_profile()
        self.end()
        self._maker.forget()
        self.plan = None
        self.summary = "policy 'auto' has given way: the device ran out of memory"

    def everything_offloaded(self) -> OffloadAll:
        """Return what is done while micro-batches are measured."""
        return OffloadAll(self._request.min_bytes, name=NAME)
