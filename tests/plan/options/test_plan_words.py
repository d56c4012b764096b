"""A plan's own line: what is done, what it comes to, and whether it fits."""

from __future__ import annotations

from typing import Any

import pytest

from hf_pyao.plan.documents.plan import KEEP, OFFLOAD, Plan, PlannedSlot
from hf_pyao.plan.documents.plan_facts import KEEP_EVERYTHING, PlanFacts
from hf_pyao.plan.options.auto_plan import SOURCE, describe

MIB = 2**20


def plan(name: str = "", *, limit: float = 10.0, **more: Any) -> Plan:
    facts = PlanFacts(
        step_ms=2.0,
        peak_bytes=6 * MIB,
        kept_step_ms=1.0,
        kept_peak_bytes=20 * MIB,
        limit_bytes=int(limit * MIB),
    )
    source = f"{SOURCE}: {name}" if name else SOURCE
    return Plan(**{"source": source, "slots": [], "otherwise": KEEP, "facts": facts, **more})


@pytest.mark.parametrize("levers", [{"checkpoint_every": 1}, {"checkpoint_every": 2}])
def test_layers_that_run_again_are_not_said_to_be_kept(levers: dict[str, Any]) -> None:
    found = describe(plan(KEEP_EVERYTHING, levers=levers))
    assert "run again, nothing is offloaded; predicted peak" in found
    assert KEEP_EVERYTHING not in found


@pytest.mark.parametrize(
    "made",
    [
        plan(KEEP_EVERYTHING, limit=5.0),
        plan(KEEP_EVERYTHING, limit=5.0, levers={"checkpoint_every": 1}),
        plan("offload everything", limit=5.0, otherwise=OFFLOAD),
        plan(limit=5.0, slots=[PlannedSlot(name="mlp:0", action=OFFLOAD)], otherwise=OFFLOAD),
    ],
)
def test_a_plan_that_does_not_fit_says_so(made: Plan) -> None:
    assert describe(made).endswith("; it does not fit: 6.0 MiB of 5.0 MiB")


def test_a_plan_that_fits_does_not() -> None:
    for made in (plan(KEEP_EVERYTHING), plan("offload everything", otherwise=OFFLOAD)):
        assert "fit:" not in describe(made)
    assert describe(plan(KEEP_EVERYTHING)) == "it offloads nothing, since everything fits"
