"""Plans that keep, offload and rebuild in one layer, in hand loops with ``use_cache`` as it comes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.documents.plan import Plan, PlannedSlot
from hf_pyao.planning.plan_policy import PlanPolicy
from tests.helpers import (
    ARCHITECTURES,
    EVERY_LAYER,
    assert_same_tensors,
    gradients_of,
    tiny_batch,
    tiny_model,
)

ACTIONS = ("keep", "offload", "recompute")


def step(model: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(**tiny_batch(0)).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


def slots_of(model: Any) -> list[str]:
    """Return the names of what the layers save."""
    seen: dict[str, None] = {}

    class Noting:
        name = "noting"

        def decide(self, slot: Any, situation: Any) -> Any:
            from hf_pyao.runtime.policy import Keep

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
