"""Which levers of a plan a configuration allows: those left open, and tiles if they are "auto".

A plan is for one step: segments of so many layers, MLPs in so many tiles, a certain loss. A plan
that contradicts what the user gave is refused. Tiles and the chunked loss change the order of sums,
so no plan switches them on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_pyao.config import SETTINGS, PyAOConfig
from hf_pyao.levers import Levers
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.documents.plan_facts import PlanError
from hf_pyao.plan.policies.plan_policy import PlanPolicy
from hf_pyao.settings.removed import REMOVED_SETTINGS, removed
from hf_pyao.text import Labels, echo


def free_levers(config: PyAOConfig) -> frozenset[str]:
    """Return the levers that a plan may set for *config*, since they were left open.

    A number of tiles is free where it is ``"auto"``: without that there are none, since tiles
    change the order of sums. The loss is never free.
    """
    if config.policy not in ("auto", "plan") and not isinstance(config.policy, PlanPolicy):
        return frozenset()
    found = {"mlp_tiles"} if config.effective().mlp_tiles == "auto" else set()
    found |= {"attention_groups"} & config.left_open
    if "checkpoint_every" in config.left_open and not config.recompute_modules:
        found |= {"checkpoint_every"}
        found |= {"checkpoint_nested", "save_attention"} & config.left_open
    return frozenset(found)


@dataclass(frozen=True, kw_only=True)
class GivenLevers:
    """The levers of a configuration: what they are, and which of them a plan may set."""

    levers: Levers
    """What runs where no plan says otherwise."""
    free: frozenset[str]
    """Those that a plan may set: see :func:`free_levers`."""
    labels: Labels = field(default_factory=Labels, compare=False)
    """How messages call the fields."""

    @classmethod
    def of(cls, config: PyAOConfig) -> GivenLevers:
        """Return those of *config*."""
        labels = config.all_labels()
        return cls(levers=Levers.of(config), free=free_levers(config), labels=labels)


def levers_of_plan(plan: Plan, given: GivenLevers) -> Levers:
    """Return the levers with which *plan* is followed.

    Raises:
        PlanError: it needs others than were given; says which, and what to do.
    """
    settings = given.levers.settings()
    found = dict(settings)
    for name, value in plan.levers.items():
        gone = removed(name, value)
        if gone is not None:
            raise PlanError(
                f"the plan was made by an earlier version: {gone.said_of(name, value)} Then make "
                "a plan for this configuration (delete the one that is kept).",
                key="plan-other-settings",
            )
        if name in REMOVED_SETTINGS:  # it was off
            continue
        planned = SETTINGS[name].kind.check(name, value)
        if planned is None or planned == settings[name]:
            continue
        if name == "head_loss" and "auto" in (planned, settings[name]):
            continue
        if name not in given.free:
            raise _contradicts(name, planned, settings[name], given.labels[name])
        found[name] = planned
    return Levers(**found)


def _contradicts(name: str, planned: Any, given: Any, label: str) -> PlanError:
    why = ""
    if name == "mlp_tiles" and given == "off":
        why = ", and a plan does not switch tiles on, which change the order of sums"
        number = "" if planned == "auto" else f" or {planned!r}"
        remedy = f"Give {label}='auto'{number} to follow it"
    else:
        remedy = f"Give {label}={planned!r} to follow it"
    return PlanError(
        f"the plan was made for {name}={echo(planned)}, and here {label} is {echo(given)}{why}. "
        f"{remedy}, or make a plan for this configuration (delete the one that is kept).",
        key="plan-other-settings",
    )
