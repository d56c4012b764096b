"""Which of several plans to take where speeds are not known exactly: the one that loses least.

A plan that offloads is made for a ratio of the link's speed to compute's. Where both are off by
the same factor, all plans are faster or slower by that factor: only the ratio matters. A plan's
*regret* at a ratio is its time over the fastest known plan's there, less 1. Chosen is the plan
whose worst regret over a range of ratios is least (Savage: The theory of statistical decision,
1951). Before that, plans that would lose to a plain way of training anywhere in the range are left
out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from hf_pyao.plan.hardware.speeds import LinkModel

Plan = TypeVar("Plan")

AS_GIVEN = 1.0
"""The ratio of the speeds that a plan is made for."""

MEASURED = (AS_GIVEN,)
"""Ratios for speeds that were measured: a run corrects them as it goes
(``../solve/correction.py``)."""

OFF_BY_30_PERCENT = (0.7 / 1.3, 1.3 / 0.7)
"""The least and the largest ratio where link and compute are off by 30 % each."""

HALF_A_LINK = 0.5 / 1.3
"""The ratio in a slot with half the lanes, as many boards have, where compute is 30 % faster."""

PRESET = (HALF_A_LINK, OFF_BY_30_PERCENT[0], AS_GIVEN, OFF_BY_30_PERCENT[1])
"""Ratios for speeds from a data sheet."""

NEVER_SLOWER = 0.02
"""By how much a plan may be slower than a plain way anywhere in the range."""

SAME_REGRET = 0.002
"""Regrets that differ by less are equal: the time at the speeds as given counts then."""


def scaled(link: LinkModel, ratio: float) -> LinkModel:
    """Return *link* with *ratio* times the speed."""
    return dataclasses.replace(
        link,
        d2h_gib_per_s=link.d2h_gib_per_s * ratio,
        h2d_gib_per_s=link.h2d_gib_per_s * ratio,
        host_memory_gib_per_s=link.host_memory_gib_per_s * ratio,
    )


def likely_of(ratios: Iterable[float]) -> tuple[float, ...]:
    """Return the ratios at which speeds are off by 30 % at most."""
    return tuple(ratio for ratio in ratios if ratio >= OFF_BY_30_PERCENT[0])


def worst_regret(
    plan: Plan, rivals: Iterable[Plan], ratios: Iterable[float], ms: Callable[[Plan, float], float]
) -> float:
    """Return a plan's time over the fastest rival's, less 1, at the ratio where that is largest.

    Args:
        plan: the plan.
        rivals: what it is compared with.
        ratios: of the link's speed to compute's.
        ms: says what a step takes under a plan, at a ratio.
    """
    rivals = list(rivals)
    return max(ms(plan, ratio) / min(ms(each, ratio) for each in rivals) - 1 for ratio in ratios)


def steadiest(
    plans: Sequence[Plan],
    bounds: Sequence[Sequence[tuple[Sequence[Plan], Sequence[float]]]],
    ratios: Sequence[float],
    ms: Callable[[Plan, float], float],
    rank: Callable[[Plan], tuple[float, ...]],
) -> Plan:
    """Return the plan with the least worst regret.

    Args:
        plans: to choose from.
        bounds: rivals that the plan must not lose to, and the ratios at which it must not; several
            of these at once. Of the alternatives, the first counts that some plan meets.
        ratios: of the link's speed to compute's.
        ms: says what a step takes under a plan, at a ratio.
        rank: orders plans of equal regret.
    """
    steady: Sequence[Plan] = plans
    for alternative in bounds:
        found = [
            plan
            for plan in plans
            if all(
                rivals and worst_regret(plan, rivals, where, ms) <= NEVER_SLOWER
                for rivals, where in alternative
            )
        ]
        if found:
            steady = found
            break
    likely = likely_of(ratios)
    regret = {id(plan): worst_regret(plan, plans, likely, ms) for plan in steady}
    least = min(regret.values())
    equal = [plan for plan in steady if regret[id(plan)] <= least + SAME_REGRET]
    return min(equal, key=rank)
