"""Policy ``pyao``: times the first micro-batches, decides once, and goes on with the plan."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import torch

from hf_pyao.auto.machine import actions as do
from hf_pyao.auto.machine import events as on
from hf_pyao.auto.machine.driver import Driver
from hf_pyao.auto.machine.states import Ready, State
from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.errors import PyAOError, warn
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.measure.pack_intervals import PackIntervals
from hf_pyao.plan.paper.iqr import find_outliers
from hf_pyao.plan.paper.pyao_plan import plan_of_rule
from hf_pyao.ranks import process_rank

logger = logging.getLogger(__name__)


class PyAORule:
    """Times an engine's micro-batches, and gives the machine a plan when that is done.

    Until then everything is offloaded. Nothing is decided where the link's speed is not known.

    Args:
        engine: what is timed.
        driver: told of the plan; it says when to begin and to stop.
        transport: whose clock and whose measured speed are used.
        device: where the model is.
        identity: what tells the model.
        num_micro_batches: how many are timed.
        plan_path: where the plan is kept; None: nowhere.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        driver: Driver,
        transport: Transport,
        device: torch.device,
        identity: Mapping[str, Any],
        *,
        num_micro_batches: int,
        plan_path: str | os.PathLike[str] | None,
    ) -> None:
        self._engine = weakref.ref(engine)
        self._driver = driver
        self._transport = transport
        self._num_micro_batches = num_micro_batches
        # Where it was asked for, also if the script goes to another folder.
        self._plan_path = None if plan_path is None else os.path.abspath(plan_path)
        self._identity = dict(identity)
        intervals = PackIntervals(transport, device, num_micro_batches, self._decide)
        self._intervals = weakref.ref(intervals)  # which holds this
        engine.observe_too(intervals)
        driver.perform_with(self.perform)
        driver.send(on.Starts())

    @property
    def plan(self) -> Plan | None:
        """What was decided; None until then, and once something else decides."""
        ready = self._driver.state.now.ready
        return None if ready is None else ready.plan

    def perform(self, action: do.Action, state: State) -> on.Event | None:
        """Stop timing, where that is asked for; nothing else is for the rule."""
        engine, intervals = self._engine(), self._intervals()
        if isinstance(action, do.CancelMeasuring) and engine is not None and intervals is not None:
            engine.stop_observing(intervals)
        return None

    def _decide(self, intervals: PackIntervals) -> None:
        engine = self._engine()
        if engine is None:
            return
        engine.stop_observing(intervals)
        speed = self._transport.bandwidth()
        known = [each for each in (speed.d2h_gib_per_s, speed.h2d_gib_per_s) if each]
        rates = intervals.throughput_gib_per_s()
        if not known or not rates:
            why = "the link's speed is not known" if rates else "compiled layers cannot be timed"
            warn(
                logger,
                "offloads-everything",
                "policy 'pyao' goes on offloading everything, and keeps no plan: %s after %d "
                "micro-batches.",
                why,
                self._num_micro_batches,
            )
            self._driver.send(on.GivesUp(""))
            return
        outliers = find_outliers(rates, fmean(known))
        plan = plan_of_rule(
            outliers.flagged,
            intervals.saved(),
            rates,
            model=self._identity,
            figures={
                "link_gib_per_s": outliers.link_gib_per_s,
                "upper_bound_gib_per_s": outliers.upper_bound_gib_per_s,
                "num_micro_batches": float(self._num_micro_batches),
                **{f"throughput_gib_per_s/{path}": rate for path, rate in rates.items()},
            },
        )
        flagged = ", ".join(outliers.flagged) or "nothing"
        words = f"recomputes {flagged} and offloads the rest"
        self._driver.send(on.PlanGiven(Ready(plan, words), ""))
        logger.info(
            "policy 'pyao' %s: above %.1f GiB/s, the bound for outliers, and above the link's "
            "%.1f GiB/s.",
            words,
            outliers.upper_bound_gib_per_s,
            outliers.link_gib_per_s,
        )
        self._keep(plan)

    def _keep(self, plan: Plan) -> None:
        if self._plan_path is None or not process_rank().is_first:
            return
        try:
            plan.to_json_file(self._plan_path)
        except PyAOError as error:  # no reason to end a training
            warn(logger, "plan-not-written", "the plan is not kept: %s", error)
