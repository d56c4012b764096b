"""``pyao plan --try`` and ``pyao plan`` give one time for one step of one profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_pyao import attach
from hf_pyao.engine.runtime.policy import OffloadAll
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.predict.forecast import Forecast
from hf_pyao.plan.predictor.predictor import Predictor
from hf_pyao.plan.solve.planner import KEEP_ALL, OFFLOAD_ALL
from tests.helpers import EVERY_LAYER, tiny_batch, tiny_model


@pytest.mark.parametrize(("model_type", "kept"), [("llama", 0), ("gpt2", 1)])
def test_copies_that_block_cost_the_same_in_both(
    model_type: str, kept: int, tmp_path: Path
) -> None:
    """On a CPU the host stands in for the device, and compute stands still while copies run."""
    path = tmp_path / "profile.json"
    config = EVERY_LAYER.with_settings(
        profile=str(path), profile_steps=2, keep_last_layers=kept, window=2**20
    )
    model = tiny_model(model_type)
    with attach(model, config):
        for _ in range(4):
            model(**tiny_batch(0), use_cache=False).loss.backward()
    profile = Profile.from_json_file(path)
    forecast = Forecast(profile, window_bytes=2**20)
    assert forecast.is_blocking
    binds = PlanRequest.of_config(config)
    predictor = Predictor.of_profile(profile, binds, lambda levers: pytest.fail(str(levers)))
    planner = predictor.planner(1, binds.levers)
    simple = planner.simple()
    leaves = forecast.leaving(OffloadAll(0), kept)
    expected = forecast.outcome(leaves).timed
    assert expected.stall_forward_ms > 0
    assert simple[OFFLOAD_ALL].step_ms == pytest.approx(expected.step_ms)
    assert simple[OFFLOAD_ALL].timed.stall_backward_ms == pytest.approx(expected.stall_backward_ms)
    nothing = forecast.outcome([False] * len(leaves))
    assert simple[KEEP_ALL].step_ms == pytest.approx(nothing.step_ms)
