"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
from hf_pyao.settings import amount_of


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


def _plan(settings: PolicySettings) -> Policy:
    assert settings.plan is not None
    return PlanPolicy(Plan.from_json_file(settings.plan), settings.min_bytes)


POLICIES: dict[str, Callable[[PolicySettings, Selection], Policy]] = {
    # Until 'auto' and 'pyao' have decided: see auto/policy.py and pyao_rule.py.
    "auto": lambda settings, _: OffloadAll(settings.min_bytes, name="auto"),
    "all": lambda settings, _: OffloadAll(settings.min_bytes),
    "modules": lambda settings, selected: OffloadModules(settings.min_bytes, selected),
    "budget": lambda settings, _: _budget(settings),
    "plan": lambda settings, _: _plan(settings),
    "pyao": lambda settings, _: OffloadAll(settings.min_bytes, name="pyao"),
    "off": lambda settings, _: OffloadNothing(),
}


def make_policy(settings: PyAOConfig | PolicySettings, selected: Selection | None = None) -> Policy:
    """Return the policy that a configuration names.

    Args:
        settings: a configuration, or what policies take of it.
        selected: the sub-modules that ``PyAOConfig.modules`` stands for in this model.

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
    return POLICIES[settings.policy](settings, selected or {})
