"""Decides on an attached model's saved tensors: engine, policy, machine and measurements."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from hf_pyao.auto.install.fixed_slots import FixedSlots
from hf_pyao.auto.install.lever_switch import LeverSwitch
from hf_pyao.auto.install.weights import StreamedLayers
from hf_pyao.auto.install.wiring import make_engine
from hf_pyao.auto.machine import events as on
from hf_pyao.auto.machine.driver import Driver, Policies
from hf_pyao.auto.machine.rules import MOST_ROUNDS
from hf_pyao.auto.machine.states import Ready, State
from hf_pyao.auto.measuring import Measuring
from hf_pyao.auto.parts import Parts
from hf_pyao.auto.plans.batch_fit import policy_of
from hf_pyao.auto.plans.host_and_disk import MeasuredHostAndDisk
from hf_pyao.auto.policy import AutoPolicy
from hf_pyao.auto.pyao_rule import PyAORule
from hf_pyao.auto.residency import Residency
from hf_pyao.auto.retry.tightening import MachineTightening, Tightening, paths_of, rungs_of
from hf_pyao.engine.recompute.verification import SEGMENT, SecondRuns, Wrong
from hf_pyao.engine.runtime.backward_order import BackwardOrder
from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.engine.runtime.policy import KeepEverything, OffloadAll, Policy, RecomputeSelected
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.levers import Levers
from hf_pyao.model.map.found_layers import FoundLayers
from hf_pyao.model.map.model_identity import identity_of
from hf_pyao.model.map.module_roles import resolve_selections
from hf_pyao.model.map.wrappers import named_submodules
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.hardware.device_limit import allocator_settings, release_cached
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.policies.by_name import make_policy
from hf_pyao.plan.policies.plan_policy import PlanPolicy


class Deciding:
    """An engine, and what gives it its policy.

    Args:
        model: what is attached; it is not held.
        found: its layers.
        parts: what was given.
        plan: what the policy follows from the first step on; None: nothing yet.
        levers: what is followed: those that were given, or the plan's.
        link: the engine's.
        device: where the model is.
        backward_order: as in :func:`~hf_pyao.attach`.
        second_runs: checks what the engine rebuilds.
        streaming: streams frozen weights; None: all are on the device.

    Raises:
        ConfigError: a role or module name is unknown to this model.
        PlanError: a plan was made for another model.
        ReportError: a plan, or a profile that is there already, cannot be read.
    """

    def __init__(
        self,
        model: nn.Module,
        found: FoundLayers,
        parts: Parts,
        plan: Plan | None,
        levers: Levers,
        link: LinkContext,
        device: torch.device,
        backward_order: BackwardOrder | None,
        *,
        second_runs: SecondRuns | None = None,
        streaming: StreamedLayers | None = None,
    ) -> None:
        self._link = link
        self._free_levers = parts.levers.free
        named = parts.policy.policy
        identity = identity_of(found)
        check_plan = _plan_check(identity, found)
        selected = resolve_selections(parts.modules.names, found, field=parts.modules.label)
        policy = make_policy(parts.policy, selected, plan)
        if isinstance(policy, PlanPolicy):
            check_plan(policy.plan)
        fixed = FixedSlots.of(found, parts.fixed, levers)
        self.engine = make_engine(
            model,
            fixed.around(policy),
            link,
            codec=parts.codec,
            enters_always=bool(levers.checkpoint_every),
            backward_order=backward_order,
            second_runs=second_runs,
        )
        self.switch = LeverSwitch(levers)
        """Changes segments and tiles between forwards."""
        request = _request(parts, fixed, link, device, streaming)
        state = _first_state(parts, policy, fixed, levers)
        policies = _policies(self.engine, found, request, device, fixed, is_auto=named == "auto")
        residency: Residency | None = None
        if streaming is not None and request.stream_weights == "auto":
            residency = Residency(streaming, parts.auto, request, str(named))
        self._residency = residency
        self.driver = Driver(self.engine, policies, self.switch, state, residency)
        """Of the machine that decides; the only caller of ``engine.use``."""
        self.tightening: Tightening = MachineTightening(
            self.driver,
            self.switch,
            lambda: residency is not None and residency.can_stream_more,
        )
        """What makes room where a micro-batch does not fit."""
        self.measuring = Measuring(self.engine, link, device, parts.measuring, self.switch)
        """What measures, for a profile that is asked for or for policy ``auto``."""
        self.pyao_rule: PyAORule | None = None
        """What decides, with policy ``pyao``; None with others, or where a plan was kept."""
        self.auto: AutoPolicy | None = None
        """What plans, with policy ``auto``; None with others."""
        if named == "pyao" and plan is None:
            self.pyao_rule = PyAORule(
                self.engine,
                self.driver,
                link.transport,
                device,
                identity,
                num_micro_batches=parts.measuring.num_micro_batches,
                plan_path=parts.policy.plan,
            )
        if named == "auto":
            self.auto = AutoPolicy(
                self.engine,
                self.driver,
                device,
                parts.auto,
                request,
                identity=identity,
                switch=self.switch,
                check_plan=check_plan,
                measurer=self.measuring,
                num_sampled=lambda: 0 if second_runs is None else second_runs.num_sampled,
                num_resident=lambda: None if streaming is None else streaming.num_resident,
            )
            self.auto.decide_at_once()
        plans = self.auto is not None and self.auto.measures
        if parts.measuring.path is not None or plans:
            self.measuring.prepare(model, found, identity, self.auto if plans else None)

    @property
    def plan(self) -> Plan | None:
        """What is followed, with policies that follow a plan; None with others, or before it."""
        if self.auto is not None:
            return self.auto.plan
        if self.pyao_rule is not None:
            return self.pyao_rule.plan
        policy = self.engine.policy.innermost
        return policy.plan if isinstance(policy, PlanPolicy) else None

    @property
    def may_come(self) -> frozenset[str]:
        """The levers that plans of policy ``auto`` may set later."""
        return frozenset() if self.auto is None else self._free_levers

    @property
    def is_measuring(self) -> bool:
        """True while a profile is made."""
        return self.measuring.is_measuring

    def start(self, model: nn.Module, owner: object) -> None:
        """Watch *model*, where that is needed; *owner* is to be found by the hooks."""
        if self._residency is not None:
            self._residency.start(model, owner)
        if self.auto is not None:
            self.auto.start(model, owner)
        self.measuring.start(model, owner, self.auto)

    def end(self) -> None:
        """Take everything off. Twice is fine."""
        if self._residency is not None:
            self._residency.end()
        if self.auto is not None:
            self.auto.end()
        self.measuring.end()
        self._link.leave(self.engine.mover)

    def made_room(self) -> None:
        """Note that something makes room: PyAO's rule, which would hold more, decides no more."""
        if self.pyao_rule is not None:
            self.driver.send(on.GivesUp(""))

    def without_second_runs(self, wrong: Collection[Wrong], why: str) -> str:
        """Run each layer once from the next forward on: nothing is recomputed or tiled.

        Policy ``auto`` makes another plan before that forward, without segments, if only these went
        *wrong*, and if the user did not ask for them.

        Args:
            wrong: whose second runs were not like the first ones.
            why: says so, for reports.

        Returns:
            What is done from then on, to follow "from now on".
        """
        may_replan = (
            all(each.kind == SEGMENT for each in wrong) and "checkpoint_every" in self.may_come
        )
        self.switch.refuse_segments(why)
        self.driver.send(on.SecondRunWrong(may_replan, why))
        done = "no layer runs again in backward, and everything that the layers save is offloaded"
        return f"{done}, until policy 'auto' has another plan" if may_replan else done

    def summary(self) -> str:
        """Say what policy ``auto`` does; empty with others, and before it has decided."""
        return "" if self.auto is None else self.auto.summary

    def measured_memory(self) -> str:
        """Say what policy ``auto`` measured of the device's memory; empty if nothing."""
        return "" if self.auto is None else self.auto.measured_memory()

    def report(self) -> dict[str, Any]:
        """Return plain values that the run's report is to hold."""
        if self.auto is not None:
            return self.auto.report()
        transitions = self.driver.transitions()
        return {"transitions": transitions} if transitions else {}


def _request(
    parts: Parts,
    fixed: FixedSlots,
    link: LinkContext,
    device: torch.device,
    streaming: StreamedLayers | None,
) -> PlanRequest:
    """Return what binds plans for the model on this machine."""
    bound = parts.binds.on(
        recomputed_paths=fixed.recomputed_paths,
        window=link,
        below=MeasuredHostAndDisk(link.tiers, None if streaming is None else streaming.memory),
        allocator=allocator_settings(device),
    )
    if streaming is None:
        return bound
    keeps_places = streaming.memory.disk.placed is not None
    return dataclasses.replace(
        bound,
        stream_weights=streaming.num_resident if keeps_places else parts.streaming.value,
        ends_on_host=streaming.ends_leave,
    )


def _first_state(parts: Parts, policy: Policy, fixed: FixedSlots, levers: Levers) -> State:
    """Return the machine's state before the first forward, with the configured *policy*."""
    named = parts.policy.policy
    decides_later = named in ("auto", "pyao") and not isinstance(policy, PlanPolicy)
    return State(
        name=str(named) if decides_later else "",
        num_rounds_left=MOST_ROUNDS,
        patience=2 * parts.measuring.num_micro_batches,
        rungs=rungs_of(
            keeps_some=parts.fixed.keep_last_layers > 0 or named != "all",
            recomputes=policy.may_recompute or fixed.recomputes or decides_later,
            has_segments=bool(levers.checkpoint_every),
        ),
    )


def _policies(
    engine: OffloadEngine,
    found: FoundLayers,
    request: PlanRequest,
    device: torch.device,
    fixed: FixedSlots,
    *,
    is_auto: bool,
) -> Policies:
    """Return the policies that the machine may use; the configured one is the engine's now."""
    everything = OffloadAll(request.min_bytes)

    def of_plan(ready: Ready) -> Policy:
        if is_auto:
            return policy_of(ready.plan, request.min_bytes)
        return fixed.around(PlanPolicy(ready.plan, request.min_bytes, "pyao"))

    def window_of_plan(ready: Ready) -> int | None:
        return (ready.plan.facts.window_bytes or None) if may_set_window() else None

    def may_set_window() -> bool:
        return is_auto and request.may_set_window

    return Policies(
        configured=engine.policy,
        nothing=KeepEverything("auto"),
        everything=everything,
        recomputed=RecomputeSelected(everything, paths_of(found), is_pointwise=True),
        of_plan=of_plan,
        window_of_plan=window_of_plan,
        residents_of_plan=lambda ready: ready.plan.facts.resident_blocks,
        configured_window_bytes=lambda: request.window_bytes if may_set_window() else None,
        before_plan=functools.partial(release_cached, device),
    )


def _plan_check(identity: Mapping[str, Any], found: FoundLayers) -> Callable[[Plan], None]:
    """Return what refuses a plan that was made for another model, by a ``PlanError``."""
    layers = [(fqn, [name for name, _ in named_submodules(m)]) for fqn, m in found.layers]

    def check(plan: Plan) -> None:
        plan.check_model(identity, layers)

    return check
