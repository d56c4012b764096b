"""For which batches a plan of policy ``auto`` is followed, and how."""

from __future__ import annotations

from hf_pyao.auto.machine.states import Ready
from hf_pyao.engine.runtime.policy import KeepEverything, Policy
from hf_pyao.plan.documents.plan import KEEP, Plan
from hf_pyao.plan.options.auto_plan import describe
from hf_pyao.plan.options.plan_levers import GivenLevers, levers_of_plan
from hf_pyao.plan.policies.plan_policy import PlanPolicy

NAME = "auto"

LARGEST_GROWTH = 2.0
"""Largest power of a batch's elements that memory grows with: attention scores grow so."""

LARGER = 1.02
"""By how much more elements a batch must have than the one planned for to be planned for anew."""


def ready_of(plan: Plan, given: GivenLevers, *, keeps_all: bool = False) -> Ready:
    """Return *plan* as one that may be followed where these levers were *given*.

    Raises:
        PlanError: it needs other levers than were given.
    """
    return Ready(
        plan,
        describe(plan),
        options=levers_of_plan(plan, given),
        num_elements=plan.facts.num_elements or 0,
        keeps_all=keeps_all,
    )


def policy_of(plan: Plan, min_bytes: int) -> Policy:
    """Return the policy that follows *plan*."""
    keeps_all = plan.otherwise == KEEP and all(slot.action == KEEP for slot in plan.slots)
    if keeps_all and plan.num_checkpointed is None:
        return KeepEverything(NAME)
    return PlanPolicy(plan, min_bytes, NAME)


def holds(plan: Plan, num_elements: int, host_limit_bytes: float) -> bool:
    """Say whether *plan* fits for batches of *num_elements* too.

    A larger batch needs at most as many times more as its square is larger, weights and what is
    beside the step apart: scores of attention that is written out grow that fast, and nothing grows
    faster. Where two sizes were recorded, their growth is known (``growth_exponent``). Where that
    fits, on the device and on the host, no other plan is needed; where the plan does not fit as it
    is, none is known that does.
    """
    facts = plan.facts
    planned, limit_bytes = facts.num_elements, facts.limit_bytes
    if limit_bytes is None or not planned or num_elements <= LARGER * planned:
        return True
    exponent = LARGEST_GROWTH if facts.growth_exponent is None else facts.growth_exponent
    growth = (num_elements / planned) ** exponent
    fixed_bytes = (facts.resident_bytes or 0) + (facts.beside_bytes or 0)
    needed = facts.total_bytes
    grown = fixed_bytes + (needed - fixed_bytes) * growth
    host_bytes = (facts.host_bytes or 0) * growth
    fits = grown <= limit_bytes and host_bytes <= host_limit_bytes
    return fits or needed > limit_bytes
