"""A way to train: what becomes of the tensors that are saved, and what changes the step itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hf_pyao.config import PyAOConfig
from hf_pyao.engine.runtime.policy import OffloadAll, OffloadNothing, Policy
from hf_pyao.levers import Levers
from hf_pyao.plan.documents.plan import KEEP, RECOMPUTE, Plan
from hf_pyao.plan.documents.plan_facts import PlanError
from hf_pyao.plan.policies.budget import OffloadBudget, hidden_bytes, leaving
from hf_pyao.plan.policies.by_name import make_policy
from hf_pyao.plan.solve.conditions import Conditions
from hf_pyao.plan.step.planned_step import PlannedStep, StepPlanner
from hf_pyao.plan.step.step_program import StepProgram


@dataclass(frozen=True)
class Way:
    """A policy or a plan, with levers."""

    name: str
    policy: str | Policy = "off"
    """A policy, or the name of one. ``"budget"`` offloads as much as forward compute hides;
    ``"auto"`` is the fastest plan that fits."""
    checkpointing: bool = False
    streams: bool = False
    """Streams frozen weights too, as many as is fastest."""
    levers: Levers | None = None
    """What changes the step itself; None: what does as it is configured."""
    plan: Plan | None = dataclasses.field(default=None, compare=False)
    """Is carried out instead of a policy."""

    @classmethod
    def of_config(cls, config: PyAOConfig) -> Way:
        """Return what *config* says of saved tensors."""
        is_auto = config.policy == "auto"
        return cls(f"policy {config.policy}", "auto" if is_auto else make_policy(config))

    def carried_out(
        self, program: StepProgram, times_ms: Sequence[float], conditions: Conditions
    ) -> PlannedStep:
        """Return the step with what this way does to saved tensors.

        Args:
            program: the step.
            times_ms: of each operation.
            conditions: say what stays in any case.

        Raises:
            PlanError: the plan names sub-modules as a whole, or is for larger or other slots.
        """
        min_bytes = conditions.min_bytes
        if self.plan is not None:
            return _with_plan(self.plan, program, times_ms, min_bytes)
        policy = self.policy
        if policy == "off":
            policy = OffloadNothing()
        elif policy == "budget":
            is_idle = conditions.is_blocking  # while copies run
            most_bytes = 0 if is_idle else hidden_bytes(program, times_ms, conditions.link)
            policy = OffloadBudget(min_bytes, max_bytes=most_bytes)
        elif isinstance(policy, str):
            policy = OffloadAll(min_bytes)
        leaves = leaving(program, policy, conditions.keep_last_layers)
        return PlannedStep(program, leaves, {}, times_ms)


def _with_plan(
    plan: Plan, program: StepProgram, times_ms: Sequence[float], min_bytes: int
) -> PlannedStep:
    if plan.recomputed_modules:
        raise PlanError(
            "the plan recomputes sub-modules as a whole (recomputed_modules), and a prediction "
            "goes slot by slot: name their slots, or have `pyao estimate` record the model.",
            key="plan-invalid",
        )
    planned = {
        (slot.name, layer): slot
        for slot in plan.slots
        for layer in (slot.layers if slot.layers is not None else [None])
    }
    known = {slot.name for slot in program.slots}
    for name, _ in planned:
        if name not in known:
            raise PlanError(
                f"the plan names the slot {name!r}, which the profile has not.",
                key="plan-other-model",
            )
    actions, otherwise = [], []
    for slot in program.slots:
        entry = planned.get((slot.name, slot.layer)) or planned.get((slot.name, None))
        action = plan.otherwise if entry is None else entry.action
        is_small = slot.nbytes < min_bytes and action != RECOMPUTE
        actions.append(KEEP if is_small else action)
        otherwise.append(plan.otherwise if entry is None else entry.otherwise)
    return StepPlanner(program, times_ms).plan(actions, plan.replayed_modules, otherwise)
