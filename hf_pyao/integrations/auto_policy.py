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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_pyao.config import PyAOConfig
from hf_pyao.errors import PyAOError
from hf_pyao.integrations.auto_check import CheckResult, PlanCheck, measured_step_ms
from hf_pyao.integrations.device_limit import beside_bytes, device_limit
from hf_pyao.integrations.model_copy import ForwardWatch, SeenForward
from hf_pyao.integrations.rank_exchange import RankExchange
from hf_pyao.integrations.run_record import is_main_process
from hf_pyao.integrations.step_recording import record_fake_step
from hf_pyao.levers import Levers
from hf_pyao.metrics import format_bytes
from hf_pyao.planning.auto_plan import SOURCE, plan_of
from hf_pyao.planning.calibration import at_other_size
from hf_pyao.planning.plan import KEEP, RECOMPUTE, Plan, PlanPolicy
from hf_pyao.planning.plan_request import PlanRequest
from hf_pyao.planning.planner import KEEP_ALL, OFFLOAD_ALL, Candidate, NoPlanFitsError, Planner
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

TIGHTER = 0.92
"""Share of the peak that is planned for after the device ran out of memory all the same."""


class AutoPolicy:
    """Gives an engine a plan when its first micro-batches have been measured.

    Args:
        engine: what follows the plan.
        device: where the model is.
        config: what binds the plan.
        pool: host memory.
        identity: what tells the model.
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
        self._identity = dict(identity)
        self._plan_path = None if config.plan is None else Path(os.path.abspath(config.plan))
        self._watch: ForwardWatch | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._exchange: RankExchange | None = None
        self._profile: Profile | None = None
        self._planner: Planner | None = None
        self._chosen: Candidate | None = None
        self._check: PlanCheck | None = None
        self._result: CheckResult | None = None
        self._limit_bytes = math.inf
        self._beside_bytes = 0
        self._num_elements = 0
        self._measured_all_ms: float | None = None
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

    def end(self) -> None:
        """Take everything off. Twice is fine."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.remove()
        self._stop_check()

    # ---- planning ------------------------------------------------------------------------------

    def profiled(self, profile: Profile | None) -> None:
        """Plan for what was measured; before a forward."""
        self._exchange = RankExchange("plan")
        self._profile = profile
        if self._exchange.rank != 0:
            return  # the first process plans
        if profile is None or profile.program is None:
            why = "nothing was measured" if profile is None else profile.why_no_program
            self.summary = f"policy 'auto' goes on offloading everything: {why}"
            self.say(self.summary)
            self._exchange.tell("")
            return
        self._measured_all_ms = measured_step_ms(profile)
        try:
            self._plan(profile, "")
        except Exception as error:  # no reason to end a training
            self.summary = (
                f"policy 'auto' goes on offloading everything: no plan was found "
                f"({describe_error(error)})"
            )
            logger.warning("%s", self.summary)
            self._exchange.tell("")

    def _plan(self, profile: Profile, why: str) -> None:
        planner = self._request.planner(profile)
        model = None if self._model is None else self._model()
        limit = device_limit(
            self._device,
            self._config.device_memory_gib,
            self._config.label("device_memory_gib"),
        )
        assert limit is not None
        parameters = () if model is None else model.parameters()
        resident_bytes = planner.program.resident_bytes
        self._beside_bytes = beside_bytes(limit, resident_bytes, parameters)
        self._limit_bytes = limit.nbytes - self._beside_bytes
        self._planner = planner
        self._choose(f"{why}{limit.how}")

    def _choose(self, why: str) -> None:
        """Take the fastest plan within the limit."""
        planner = self._planner
        assert planner is not None
        try:
            chosen = planner.best(self._limit_bytes)
        except NoPlanFitsError as error:
            chosen = planner.least()
            logger.warning(
                "policy 'auto': %s It is taken all the same. What would help: "
                "head_loss='chunked', a smaller micro-batch, shorter sequences.",
                error,
            )
        self._adopt(chosen, why)

    def _adopt(self, chosen: Candidate, why: str) -> None:
        planner = self._planner
        assert planner is not None
        self._chosen = chosen
        plan = plan_of(
            planner,
            chosen,
            limit_bytes=self._limit_bytes + self._beside_bytes,
            model=self._identity,
            figures={
                "beside_bytes": float(self._beside_bytes),
                "num_elements": float(self._num_elements),
            },
        )
        self.follow(plan, why)
        self.say(self.summary)
        self._keep_plan()
        if self._exchange is not None:
            self._exchange.tell(json.dumps(plan.to_dict()))
        self._stop_check()
        engine = self._engine()
        if chosen.name != KEEP_ALL and engine is not None:
            self._check = PlanCheck(engine, self._device, self._config.profile_steps)
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
        if self._result is not None:
            measured = {
                "measured_layers_ms": self._result.layers_ms,
                "measured_stall_ms": self._result.stall_ms,
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
        except PyAOError as error:
            logger.warning("the plan in the checkpoint is not followed: %s", error)
            return
        for key, value in plan.model.items():
            if key in self._identity and self._identity[key] != value:
                logger.warning("the plan in the checkpoint is of another model: %s differs", key)
                return
        self.cancel_profile()
        self.follow(plan, "the plan in the checkpoint")
        self.say(self.summary)

    def _before_forward(self, seen: SeenForward, *, is_first: bool) -> None:
        if is_first and self._watch is not None:
            self._num_elements = self._watch.num_elements()  # of the step that is recorded
        try:
            if self._exchange is not None and self._exchange.rank != 0:
                self._hear_of_plan()
            elif self._planner is not None:
                self._look_again()
            elif self.plan is not None:
                self._check_size(self.plan)
        except Exception as error:  # no reason to end a training
            logger.warning("policy 'auto' keeps its plan: %s", describe_error(error))
            self._planner = None

    def _hear_of_plan(self) -> None:
        assert self._exchange is not None
        text = self._exchange.heard_from(0)
        if text is None:
            return
        self._exchange = RankExchange("plan")  # for the next one
        if text:
            self.follow(Plan.from_dict(json.loads(text)), "the first process's plan")

    def _look_again(self) -> None:
        watch = self._watch
        if watch is None:
            return
        num_elements = watch.num_elements()
        if num_elements > LARGER * self._num_elements > 0:
            self._plan_for_larger(num_elements)
        elif self._check is not None and self._check.is_done:
            self._compare(self._check)

    def _check_size(self, plan: Plan) -> None:
        """Offload everything where a plan of another run is for smaller batches."""
        planned = plan.figures.get("num_elements", 0.0)
        watch, engine = self._watch, self._engine()
        num_elements = 0 if watch is None else watch.num_elements()
        if engine is None or not planned or num_elements <= LARGER * planned:
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
        watch, profile, planner = self._watch, self._profile, self._planner
        assert watch is not None
        if profile is None or profile.program is None or planner is None:
            return
        was = self._num_elements
        self._num_elements = num_elements
        recorded, _ = record_fake_step(
            watch.step(is_newest=True), levers=Levers.of(self._config), layers=self._config.layers
        )
        larger = at_other_size(profile, planner.program, recorded)
        self._exchange = RankExchange("plan")
        self._plan(larger, f"for batches of {num_elements} elements instead of {was}; ")

    def _compare(self, check: PlanCheck) -> None:
        """Set what the plan came to beside what was predicted; drop it if it loses."""
        self._stop_check()
        chosen, planner = self._chosen, self._planner
        assert chosen is not None
        assert planner is not None
        found = self._result = check.result()
        if found is None:
            return
        predicted_ms = chosen.step_ms
        logger.info(
            "policy 'auto': a micro-batch takes %.1f ms in the layers, %.1f of them waiting for "
            "copies; %.1f and %.1f were predicted for the step.",
            found.layers_ms,
            found.stall_ms,
            predicted_ms,
            chosen.timed.stall_forward_ms + chosen.timed.stall_backward_ms,
        )
        fallback = planner.simple().get(OFFLOAD_ALL)
        if (
            self._measured_all_ms is not None
            and chosen.name != OFFLOAD_ALL
            and fallback is not None
            and fallback.peak_bytes <= self._limit_bytes
            and found.layers_ms > self._measured_all_ms * check.margin
        ):
            self.say(
                f"policy 'auto' drops its plan, which takes {found.layers_ms:.1f} ms where "
                f"offloading everything took {self._measured_all_ms:.1f}."
            )
            self._chosen = fallback
            plan = plan_of(planner, fallback, model=self._identity)
            self.follow(plan, "its fallback")
            self._keep_plan()

    def _stop_check(self) -> None:
        check, self._check = self._check, None
        if check is not None:
            check.stop()

    # ---- out of memory -------------------------------------------------------------------------

    def tighter(self, error: BaseException) -> str | None:
        """Plan for less memory, since the device ran out of it.

        Returns:
            What is done from now on; None if there is nothing tighter.
        """
        engine, planner, chosen = self._engine(), self._planner, self._chosen
        if engine is None or planner is None or chosen is None:
            return None
        self._stop_check()
        least = planner.least()
        if chosen.peak_bytes <= least.peak_bytes:
            return None
        self._limit_bytes = max(TIGHTER * chosen.peak_bytes, least.peak_bytes)
        self._choose("after the device ran out of memory")
        return "another plan is followed" if self.plan is None else describe(self.plan)

    def stop_planning(self) -> None:
        """Plan no more: something else decides from now on."""
        self.cancel_profile()
        self.end()
        self._planner = self._chosen = self.plan = None
        self.summary = "policy 'auto' has given way: the device ran out of memory"

    def everything_offloaded(self) -> OffloadAll:
        """Return what is done while micro-batches are measured."""
        return OffloadAll(self._request.min_bytes, name=NAME)


def describe(plan: Plan) -> str:
    """Say in a few words what a plan does, and what it is predicted to come to."""
    counts: dict[str, int] = {}
    for slot in plan.slots:
        number = 1 if slot.layers is None else len(slot.layers)
        counts[slot.action] = counts.get(slot.action, 0) + number
    figures = plan.figures
    if not set(counts) - {KEEP} and plan.otherwise == KEEP:
        needed = figures.get("peak_bytes", 0.0) + figures.get("beside_bytes", 0.0)
        if needed > figures.get("limit_bytes", math.inf):
            return "it offloads nothing, since no plan has a lower peak"
        return "it offloads nothing, since everything fits"
    name = plan.source.removeprefix(SOURCE).removeprefix(": ")
    what = name or ", ".join(
        f"{counts[action]} {word}"
        for action, word in (
            (KEEP, "tensors kept"),
            ("offload", "offloaded"),
            (RECOMPUTE, "recomputed"),
        )
        if action in counts
    )
    kept_ms = figures.get(f"step_ms/{KEEP_ALL}")
    if kept_ms and "peak_bytes" in figures:
        what += (
            f"; predicted peak {format_bytes(int(figures['peak_bytes']))} instead of "
            f"{format_bytes(int(figures[f'peak_bytes/{KEEP_ALL}']))}, time "
            f"{figures['step_ms'] / kept_ms - 1:+.1%}"
        )
    return what
