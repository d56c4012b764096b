"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_pyao.config import PyAOConfig
from hf_pyao.engine.runtime.policy import (
    OffloadAll,
    OffloadModules,
    OffloadNothing,
    Policy,
    Selection,
    as_policy,
)
from hf_pyao.errors import unknown_name
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.policies.budget import OffloadBudget
from hf_pyao.plan.policies.plan_policy import PlanPolicy
from hf_pyao.settings.sizes import amount_of


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """What policies are made of."""

    policy: Any
    """Name of the policy, or one."""
    min_bytes: int
    """Least size of what leaves, in bytes."""
    budget: int | str | None
    """``PyAOConfig.budget``."""
    plan: str | None
    """File of the plan."""

    @classmethod
    def of(cls, config: PyAOConfig) -> PolicySettings:
        """Return what *config* says."""
        return cls(
            policy=config.policy,
            min_bytes=int(config.min_bytes),
            budget=config.budget,
            plan=None if config.plan is None else str(config.plan),
        )


def _budget(settings: PolicySettings) -> Policy:
    assert settings.budget is not None
    max_tensors, max_bytes = amount_of(settings.budget)
    return OffloadBudget(settings.min_bytes, max_tensors=max_tensors, max_bytes=max_bytes)


def _plan(settings: PolicySettings, plan: Plan | None) -> Policy:
    assert plan is not None
    return PlanPolicy(plan, settings.min_bytes)


def _pyao(settings: PolicySettings, plan: Plan | None) -> Policy:
    if plan is None:
        return OffloadAll(settings.min_bytes, name="pyao")
    return PlanPolicy(plan, settings.min_bytes, "pyao")


POLICIES: dict[str, Callable[[PolicySettings, Selection, Plan | None], Policy]] = {
    # Until 'auto' and 'pyao' have decided: see auto/policy.py and pyao_rule.py.
    "auto": lambda settings, *_: OffloadAll(settings.min_bytes, name="auto"),
    "all": lambda settings, *_: OffloadAll(settings.min_bytes),
    "modules": lambda settings, selected, _: OffloadModules(settings.min_bytes, selected),
    "budget": lambda settings, *_: _budget(settings),
    "plan": lambda settings, _, plan: _plan(settings, plan),
    "pyao": lambda settings, _, plan: _pyao(settings, plan),
    "off": lambda *_: OffloadNothing(),
}


def given_plan(settings: PolicySettings) -> Plan | None:
    """Return the plan that the policy follows from the first step on; None if there is none.

    Policy ``plan`` follows the plan of its file; policy ``pyao`` the one that an earlier run kept;
    a :class:`PlanPolicy` its own. Policy ``auto`` reads the plan that it keeps itself.

    Raises:
        ReportError: the file is no plan.
        PlanError: the plan contradicts itself.
    """
    if isinstance(settings.policy, PlanPolicy):
        return settings.policy.plan
    if settings.policy not in ("plan", "pyao") or settings.plan is None:
        return None
    if settings.policy == "pyao" and not Path(settings.plan).exists():
        return None
    return Plan.from_json_file(settings.plan)


def make_policy(
    settings: PyAOConfig | PolicySettings,
    selected: Selection | None = None,
    plan: Plan | None = None,
) -> Policy:
    """Return the policy that a configuration names.

    Args:
        settings: a configuration, or what policies take of it.
        selected: the sub-modules that ``PyAOConfig.modules`` stands for in this model.
        plan: what :func:`given_plan` returned; None: it is called.

    Raises:
        ConfigError: the name is unknown.
        ReportError: the plan cannot be read.
        PlanError: the plan contradicts itself.
    """
    if isinstance(settings, PyAOConfig):
        settings = PolicySettings.of(settings)
    if not isinstance(settings.policy, str):
        return as_policy(settings.policy)
    if settings.policy not in POLICIES:
        raise unknown_name("policy", settings.policy, POLICIES)
    return POLICIES[settings.policy](settings, selected or {}, plan or given_plan(settings))
