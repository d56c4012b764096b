"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable

from hf_pyao.config import PyAOConfig
from hf_pyao.documents.plan import Plan
from hf_pyao.errors import unknown_name
from hf_pyao.planning.budget import OffloadBudget
from hf_pyao.planning.plan_policy import PlanPolicy
from hf_pyao.runtime.policy import (
    OffloadAll,
    OffloadModules,
    OffloadNothing,
    Policy,
    Selection,
    as_policy,
)
from hf_pyao.settings import amount_of


def _all(config: PyAOConfig, selected: Selection) -> Policy:
    return OffloadAll(int(config.min_bytes))


def _modules(config: PyAOConfig, selected: Selection) -> Policy:
    return OffloadModules(int(config.min_bytes), selected)


def _budget(config: PyAOConfig, selected: Selection) -> Policy:
    assert config.budget is not None
    max_tensors, max_bytes = amount_of(config.budget)
    return OffloadBudget(int(config.min_bytes), max_tensors=max_tensors, max_bytes=max_bytes)


def _plan(config: PyAOConfig, selected: Selection) -> Policy:
    assert config.plan is not None
    return PlanPolicy(Plan.from_json_file(config.plan), int(config.min_bytes))


def _pyao(config: PyAOConfig, selected: Selection) -> Policy:
    """Return what is done until it has been decided, see ``integrations/pyao_rule.py``."""
    return OffloadAll(int(config.min_bytes), name="pyao")


def _auto(config: PyAOConfig, selected: Selection) -> Policy:
    """Return what is done until it has been decided, see ``integrations/auto_policy.py``."""
    return OffloadAll(int(config.min_bytes), name="auto")


def _off(config: PyAOConfig, selected: Selection) -> Policy:
    return OffloadNothing()


POLICIES: dict[str, Callable[[PyAOConfig, Selection], Policy]] = {
    "auto": _auto,
    "all": _all,
    "modules": _modules,
    "budget": _budget,
    "plan": _plan,
    "pyao": _pyao,
    "off": _off,
}


def make_policy(config: PyAOConfig, selected: Selection | None = None) -> Policy:
    """Return the policy that *config* names.

    Args:
        config: names the policy or holds an instance.
        selected: the sub-modules that ``config.modules`` stands for in this model.

    Raises:
        ConfigError: the name is unknown.
        ReportError: the plan cannot be read.
        PlanError: the plan contradicts itself.
    """
    if isinstance(config.policy, str):
        if config.policy not in POLICIES:
            raise unknown_name("policy", config.policy, POLICIES)
        return POLICIES[config.policy](config, selected or {})
    return as_policy(config.policy)
