"""Policy auto equals plain training, bit for bit: while it measures, at the switch, and after it."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from hf_pyao import attach
from hf_pyao.plan.solve.planner import OFFLOAD_ALL, Planner
from tests.helpers import (
    ACCUMULATING,
    EVERYTHING,
    MAIN,
    PRECISIONS,
    assert_same_trajectory,
    tiny_model,
    train,
)


@pytest.mark.sampled(every=23)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", MAIN)
def test_training_is_bitwise_the_same(
    model_type: str, attention: str, dropout: float, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tiny models peak elsewhere: have them keep as little as they can all the same.
    monkeypatch.setattr(Planner, "best", lambda planner, limit: planner.simple()[OFFLOAD_ALL])
    dtype, autocast = PRECISIONS[precision]
    plain = tiny_model(model_type, attention=attention, dropout=dropout, dtype=dtype)
    model = copy.deepcopy(plain)
    expected = train(plain, ACCUMULATING, autocast=autocast)
    config = replace(
        EVERYTHING, policy="auto", profile_steps=2, device_memory_gib=1.0, window=2**16
    )
    with attach(model, config) as offloader:
        found = train(model, ACCUMULATING, autocast=autocast)
        assert_same_trajectory(found, expected, "auto")
        plan = offloader.plan
        assert plan is not None, offloader.describe()
        assert {slot.action for slot in plan.slots} & {"offload", "recompute"}
        assert offloader.host_pool.settle() == 0
