"""Dynamic padding: a plan is followed for the batches that it fits, and made anew for few others."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from tests.helpers import assert_same_tensors, gradients_of, tiny_model

LENGTHS = {
    "growing": (20, 24, 31, 28, 40, 36, 44, 48),
    "first is short": (8, 32, 30, 28, 36, 33, 40, 38),
    "first is longest": (48, 20, 31, 44, 47, 12, 48, 30),
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("gib", "most_plans"), [(8.0, 1), (2e-3, 1), (6e-4, 2), (1e-5, 1)])
@pytest.mark.sampled(every=5)
def test_plans_are_few_and_gradients_right(
    lengths: str, gib: float, most_plans: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = tiny_model("llama")
    reference = copy.deepcopy(model)
    config = PyAOConfig(
        device_memory_gib=gib, min_bytes=256, profile_steps=2, window="layer", host_memory_gib=0.1
    )
    draw = torch.Generator().manual_seed(0)
    with attach(model, config) as offloader:
        for length in LENGTHS[lengths]:
            ids = torch.randint(3, 60, (4, length), generator=draw)
            found = []
            for each in (model, reference):
                each.zero_grad()
                each(input_ids=ids, labels=ids).loss.backward()
                found.append(gradients_of(each))
            assert_same_tensors(*found, f"{length}")
        plan = offloader.plan
    assert plan is not None
    new = [m for m in caplog.messages if m.startswith("policy 'auto' (") and "other plan" not in m]
    again = [m for m in caplog.messages if "measures anew" in m]
    assert not again
    assert 1 <= len(new) <= most_plans, new
    largest = 4 * max(LENGTHS[lengths][:2])
    assert plan.facts.num_elements >= largest, "it is for the largest that was measured"
