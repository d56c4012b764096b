"""What decides on an attached model's saved tensors: a policy, and what follows measurements."""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_pyao.config import SETTINGS
from hf_pyao.documents.plan import Plan
from hf_pyao.documents.run import check_report_path
from hf_pyao.integrations.auto_policy import AutoPolicy
from hf_pyao.integrations.device_limit import allocator_settings
from hf_pyao.integrations.lever_switch import LeverSwitch
from hf_pyao.integrations.model_identity import identity_of
from hf_pyao.integrations.module_map import (
    FoundLayers,
    find_layers,
    named_submodules,
    resolve_selections,
)
from hf_pyao.integrations.parts import Parts
from hf_pyao.integrations.profiling import ProfileSettings, ProfileWriter
from hf_pyao.integrations.pyao_rule import PyAORule, kept_plan
from hf_pyao.integrations.tightening import OffloadLadder, PlansFirst, Tightening
from hf_pyao.integrations.wiring import (
    first_kept_layer,
    make_engine,
    paths_in_a_layer,
    select_recomputed,
    wrap_policy,
)
from hf_pyao.integrations.wrappers import class_name
from hf_pyao.levers import Levers
from hf_pyao.planning.plan_levers import GivenLevers, levers_of_plan
from hf_pyao.planning.plan_policy import PlanPolicy
from hf_pyao.planning.policies import PolicySettings, make_policy
from hf_pyao.recompute.verification import SEGMENT, Sampler, Wrong
from hf_pyao.runtime.backward_order import BackwardOrder
from hf_pyao.runtime.lifecycle import is_compiled
from hf_pyao.runtime.policy import OffloadAll, Policy
from hf_pyao.transfer.link import LinkContext
from hf_pyao.weak_calls import weakly


class Deciding:
    """An engine, and what gives it its policy.

    Args:
        model: what is attached; it is not held.
        found: its layers.
        parts: what was given.
        levers: what is followed: those that were given, or a plan's.
        link: the engine's.
        device: where the model is.
        backward_order: as in :func:`~hf_pyao.attach`.
        is_link_shared: another model's engine uses the link too.
        sampler: checks what the engine rebuilds.

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
        levers: Levers,
        link: LinkContext,
        device: torch.device,
        backward_order: BackwardOrder | None,
        *,
        is_link_shared: bool,
        sampler: Sampler | None = None,
    ) -> None:
        self._parts = parts
        self._link = link
        self._device = device
        identity = identity_of(found)
        min_bytes, named = parts.policy.min_bytes, parts.policy.policy
        selected = resolve_selections(parts.modules.names, found, field=parts.modules.label)
        kept = kept_plan(parts.policy.plan) if named == "pyao" else None
        policy = make_policy(parts.policy, selected)
        if kept is not None:
            policy = PlanPolicy(kept, min_bytes, "pyao")
        _check_plan(policy, identity, found)
        recomputed = select_recomputed(parts.recompute.names, found, parts.recompute.label)
        wrap = functools.partial(
            wrap_policy,
            recompute=parts.recompute.names,
            selected=recomputed,
            first_kept=first_kept_layer(len(found.layers), parts.keep_last_layers, levers),
        )
        self.engine = make_engine(
            model,
            wrap(policy),
            link,
            codec=parts.codec,
            enters_always=bool(levers.checkpoint_every),
            backward_order=backward_order,
            sampler=sampler,
        )
        self.pyao_rule: PyAORule | None = None
        """What decides, with policy ``pyao``; None with others, or where a plan was kept."""
        if named == "pyao" and kept is None:
            self.pyao_rule = PyAORule(
                self.engine,
                link.transport,
                device,
                identity,
                wrap,
                num_micro_batches=parts.profile_steps,
                plan_path=parts.policy.plan,
                min_bytes=min_bytes,
            )
        self.switch = LeverSwitch(levers)
        """Changes segments and tiles between forwards."""
        self.auto: AutoPolicy | None = None
        """What plans, with policy ``auto``; None with others."""
        if named == "auto":
            request = parts.binds.on(
                recomputed_paths=paths_in_a_layer(parts.recompute.names, recomputed),
                host_limit_bytes=link.pool.capacity_bytes or math.inf,
                is_link_shared=is_link_shared,
                allocator=allocator_settings(device),
            )
            self.auto = AutoPolicy(
                self.engine,
                device,
                parts.auto,
                request,
                identity=identity,
                switch=self.switch,
                check_plan=_plan_check(identity, found),
            )
            self.auto.decide_at_once()
            _check_plan(self.engine.policy, identity, found)
        self._other_writers: list[ProfileWriter] = []
        self.profile_writer: ProfileWriter | None = None
        """What measures, for a profile that is asked for or for policy ``auto``; None else."""
        plans = self.auto is not None and self.auto.profiles
        if parts.profile.path is not None or plans:
            asked = self._profile_settings(parts.profile.path, parts.profile_steps)
            self.profile_writer = self._profile_writer(model, found, asked, identity)
        decides_later = named in ("auto", "pyao")
        recomputes = policy.may_recompute or bool(parts.recompute.names) or decides_later
        ladder = OffloadLadder(
            self.engine,
            found,
            self.switch,
            min_bytes=min_bytes,
            offloads_first=(
                (parts.keep_last_layers > 0 or named != "all")
                and (bool(levers.checkpoint_every) or not recomputes)
            ),
        )
        self.tightening: Tightening = ladder if self.auto is None else PlansFirst(self.auto, ladder)
        """What makes room where a micro-batch does not fit."""

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
    def is_measuring(self) -> bool:
        """True while a profile is made."""
        return self.profile_writer is not None and not self.profile_writer.is_complete

    def start(self, model: nn.Module, owner: object) -> None:
        """Watch *model*, where that is needed; *owner* is to be found by the hooks."""
        if self.auto is not None:
            self.auto.start(model, owner)
            self.auto.measure_anew = self._measuring(model, owner)
        if self.profile_writer is not None:
            self.profile_writer.start(model, owner)

    def _measuring(self, model: nn.Module, owner: object) -> Callable[[], None]:
        """Return what has the next micro-batches measured, for policy ``auto``; it holds nothing.

        A profile that is being made for someone else goes on.
        """
        refs = weakref.ref(self), weakref.ref(model), weakref.ref(owner)

        def measure() -> None:
            deciding, model, owner = (ref() for ref in refs)
            if not isinstance(deciding, Deciding) or not isinstance(model, nn.Module):
                return
            parts = deciding._parts
            found = find_layers(model, parts.layers.names, field=parts.layers.label)
            asked = deciding._profile_settings(None, parts.profile_steps)
            writer = deciding._profile_writer(model, found, asked, identity_of(found))
            before = deciding.profile_writer
            if before is not None and not before.is_complete:
                deciding._other_writers.append(before)
            deciding.profile_writer = writer
            writer.start(model, owner)

        return measure

    def measure(
        self,
        model: nn.Module,
        found: FoundLayers,
        owner: object,
        path: str | os.PathLike[str],
        num_micro_batches: int,
    ) -> None:
        """Measure the next micro-batches, and write their profile.

        Raises:
            ReportError: there is a file already that is no profile of this model.
        """
        path = SETTINGS["profile"].kind.check(self._parts.profile.label, path)
        num_micro_batches = SETTINGS["profile_steps"].kind.check("profile_steps", num_micro_batches)
        check_report_path(path, self._parts.profile.label)
        asked = self._profile_settings(path, num_micro_batches)
        self.profile_writer = self._profile_writer(model, found, asked, identity_of(found))
        self.profile_writer.start(model, owner)

    def end(self) -> None:
        """Take everything off. Twice is fine."""
        if self.auto is not None:
            self.auto.end()
        if self.profile_writer is not None:
            self.profile_writer.end()
        for writer in self._other_writers:
            writer.end()

    def out_of_memory(self) -> None:
        """Take note that something tighter is done: the rule's plan would hold more."""
        if self.pyao_rule is not None:
            self.pyao_rule.stop()

    def without_second_runs(self, wrong: Sequence[Wrong]) -> str:
        """Have layers run once from the next forward on: nothing is recomputed, nor tiled.

        Policy ``auto`` makes another plan before that forward, without segments, if only these went
        *wrong*.

        Returns:
            What is done from then on, to follow "from now on".
        """
        plans = self.auto is not None and all(each.kind == SEGMENT for each in wrong)
        if self.auto is not None and not plans:
            self.auto.stop_planning()
        self.switch.refuse_segments("the second run of a layer gave other tensors than forward")
        if self.pyao_rule is not None:
            self.pyao_rule.stop()
        self.switch.set(Levers(head_loss=self.switch.levers.head_loss))
        self.engine.use(OffloadAll(self._parts.policy.min_bytes))
        done = "no layer runs again in backward, and everything that the layers save is offloaded"
        return f"{done}, until policy 'auto' has another plan" if plans else done

    def summary(self) -> str:
        """Say what policy ``auto`` does; empty with others, and before it has decided."""
        return "" if self.auto is None else self.auto.summary

    def report(self) -> dict[str, Any]:
        """Return plain values that the run's report is to hold."""
        return {} if self.auto is None else self.auto.report()

    def _profile_settings(
        self, path: str | os.PathLike[str] | None, num_micro_batches: int
    ) -> ProfileSettings:
        levers = self.switch.levers  # as it runs: a plan may have set others than were given
        return ProfileSettings(
            path=None if path is None else os.fspath(path),
            num_micro_batches=num_micro_batches,
            layers=self._parts.layers.names,
            levers=levers,
            settings={**self._parts.in_force, **levers.settings()},
        )

    def _profile_writer(
        self,
        model: nn.Module,
        found: FoundLayers,
        asked: ProfileSettings,
        identity: Mapping[str, Any],
    ) -> ProfileWriter:
        auto = self.auto if self.auto is not None and self.auto.profiles else None
        writer = ProfileWriter(
            self.engine,
            self._link,
            self._device,
            asked,
            title=f"{class_name(model)} on {self._device.type}",
            identity=identity,
            layer_names=[fqn for fqn, _ in found.layers],
            has_compiled_layers=any(is_compiled(layer) for _, layer in found.layers),
            on_done=None if auto is None else weakly(auto.profiled, None),
        )
        if auto is not None:
            # Both are ours, and call each other: [Note: Who owns whom].
            auto.cancel_profile = weakly(writer.cancel, None)
            writer.on_again = weakly(auto.measures_again, None)
        return writer


def followed_levers(policy: PolicySettings, given: GivenLevers) -> Levers:
    """Return the levers of the plan that *policy* follows; those *given* if it follows none.

    Policy ``auto`` sets those of its plans itself.

    Raises:
        PlanError: the plan needs others than were given.
        ReportError: the plan cannot be read.
    """
    plan = None
    if policy.policy == "pyao":
        plan = kept_plan(policy.plan)
    elif policy.policy == "plan":
        assert policy.plan is not None
        plan = Plan.from_json_file(policy.plan)
    elif isinstance(policy.policy, PlanPolicy):
        plan = policy.policy.plan
    return given.levers if plan is None else levers_of_plan(plan, given)


def _plan_check(identity: Mapping[str, Any], found: FoundLayers) -> Callable[[Plan], None]:
    """Return what refuses a plan that was made for another model, by a ``PlanError``."""
    layers = [(fqn, [name for name, _ in named_submodules(m)]) for fqn, m in found.layers]

    def check(plan: Plan) -> None:
        plan.check_model(identity, layers)

    return check


def _check_plan(policy: Policy, identity: Mapping[str, Any], found: FoundLayers) -> None:
    """Refuse a plan that was made for another model.

    Raises:
        PlanError: it was.
    """
    if isinstance(policy, PlanPolicy):
        _plan_check(identity, found)(policy.plan)
