"""Plans that keep, offload and rebuild in one layer, in hand loops with ``use_cache`` as it comes.

Some are written out, and some are the planner's, for a link and a device's memory that are searched
for, so that the best plan mixes the three.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.runtime.policy import Keep, Policy
from hf_pyao.plan.documents.plan import Plan, PlannedSlot
from hf_pyao.plan.hardware.speeds import LinkModel
from hf_pyao.plan.options.auto_plan import plan_of
from hf_pyao.plan.options.lever_choice import LeverChoice
from hf_pyao.plan.policies.plan_policy import PlanPolicy
from hf_pyao.plan.solve.planner import KEEP_ALL, Candidate, NoPlanFitsError, Planner
from tests.helpers import (
    ARCHITECTURES,
    EVERY_LAYER,
    assert_same_tensors,
    gradients_of,
    tiny_batch,
    tiny_model,
)
from tests.helpers.simulation.transport import SimulatedTransport

ACTIONS = ("keep", "offload", "recompute")
LINKS = (30.0, 100.0, 10.0, 300.0, 3.0, 1000.0)
"""Times the speed of the link that the step was measured with."""
SHARES = (0.1, 0.05, 0.15, 0.2, 0.02, 0.3, 0.4)
"""Of the way from the lowest peak to that of keeping everything: the device's memory."""
NUM_MEASURED = 2


def step(model: Any, times: int = 1) -> dict[str, torch.Tensor]:
    """Return loss and gradients; the batch is *times* as large as the usual one."""
    torch.manual_seed(3)
    model.zero_grad()
    batch = {name: torch.cat([value] * times) for name, value in tiny_batch(0).items()}
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


def slots_of(model: Any) -> list[str]:
    """Return the names of what the layers save."""
    seen: dict[str, None] = {}

    class Noting(Policy):
        name = "noting"

        def decide(self, slot: Any, situation: Any) -> Any:
            if slot.name.rpartition(":")[2].isdigit():
                seen[slot.name] = None
            return Keep("noted")

    with attach(model, PyAOConfig(policy=Noting(), host_memory_gib=0.1)):
        step(model)
    return list(seen)


@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.sampled(every=24)
def test_gradients_are_bitwise_the_same(model_type: str, turn: int) -> None:
    model = tiny_model(model_type, dropout=0.1)
    expected = step(copy.deepcopy(model))
    slots = [
        PlannedSlot(name=name, action=ACTIONS[(number + turn) % 3])
        for number, name in enumerate(slots_of(copy.deepcopy(model)))
    ]
    assert {slot.action for slot in slots} == set(ACTIONS)
    plan = Plan(slots=slots, otherwise="offload", replayed_modules=[""])
    config = EVERY_LAYER.with_settings(policy=PlanPolicy(plan))
    with attach(model, config) as offloader:
        for _ in range(2):
            assert_same_tensors(step(model), expected, model_type)
        figures = offloader.metrics()
        assert offloader.host_pool.settle() == 0
    assert min(figures["offloaded_bytes"], figures["held_bytes"]) > 0
    assert figures["recomputed_bytes"] > 0


# ---- plans of the planner ------------------------------------------------------------------------


def measured(model_type: str) -> Planner:
    """Return the planner of policy auto, with what it has measured of this model."""
    model = tiny_model(model_type, dropout=0.1)
    config = PyAOConfig(
        policy="auto",
        profile_steps=NUM_MEASURED,
        min_bytes=256,
        window=8192,
        checkpoint_every=0,
        device_memory_gib=1e-6,
    )
    found: list[Planner] = []
    best = LeverChoice.best

    def noted(choice: LeverChoice, limit_bytes: float) -> Any:
        found.append(choice.configured)
        return best(choice, limit_bytes)

    link = LinkModel(d2h_gib_per_s=0.3, h2d_gib_per_s=0.3)
    with (
        mock.patch.object(LeverChoice, "best", noted),
        attach(model, config, transport=SimulatedTransport(0, link=link)),
    ):
        for _ in range(NUM_MEASURED + 1):
            step(model, times=16)
    return found[-1]


def over_other_links(planner: Planner) -> Iterator[Planner]:
    for ratio in LINKS:
        link = dataclasses.replace(
            planner.conditions.link, d2h_gib_per_s=0.3 * ratio, h2d_gib_per_s=0.3 * ratio
        )
        yield Planner(
            planner.program,
            planner._times_ms,
            dataclasses.replace(planner.conditions, link=link),
            host_limit_bytes=planner.host_limit_bytes,
            forced=planner._forced,
            coding=planner._coding,
        )


def actions_by_layer(planner: Planner, candidate: Candidate) -> list[set[str]]:
    found: dict[int, set[str]] = {}
    for slot, action in zip(planner.program.slots, candidate.actions, strict=True):
        found.setdefault(slot.layer, set()).add(action)
    return list(found.values())


def mixed_plan(measured: Planner) -> Plan:
    """Search for a link and a limit of which the best plan mixes all three in one layer."""
    for planner in over_other_links(measured):
        least, most = planner.least().peak_bytes, planner.simple()[KEEP_ALL].peak_bytes
        for share in SHARES:
            limit_bytes = least + share * (most - least)
            try:
                best = planner.best(limit_bytes)
            except NoPlanFitsError:
                continue
            if set(ACTIONS) in actions_by_layer(planner, best):
                return plan_of(planner, best, limit_bytes=limit_bytes)
    raise AssertionError("no link and limit was found of which the plan mixes all three")


@pytest.mark.parametrize(
    "model_type",
    ARCHITECTURES,
)
@pytest.mark.sampled(every=24)
def test_plans_of_the_planner_that_mix_are_bitwise_the_same(model_type: str) -> None:
    plan = mixed_plan(measured(model_type))
    model = tiny_model(model_type, dropout=0.1)
    expected = step(copy.deepcopy(model), times=16)
    config = PyAOConfig(
        policy=PlanPolicy(plan), min_bytes=256, window=8192, host_memory_gib=0.1, keep_last_layers=0
    )
    with attach(model, config) as offloader:
        for _ in range(2):
            assert_same_tensors(step(model, times=16), expected, model_type)
        figures = offloader.metrics()
        assert offloader.host_pool.settle() == 0
    assert min(figures["offloaded_bytes"], figures["held_bytes"]) > 0
    assert figures["recomputed_bytes"] > 0
