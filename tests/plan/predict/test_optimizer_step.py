"""What is on the device while the optimizer steps."""

from __future__ import annotations

import pytest

from hf_pyao.plan.hardware.beside_step import FOR_LOOP, FOREACH, FUSED
from hf_pyao.plan.predict.optimizer_step import optimizer_step_bytes
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.recorded_step import record_step


@pytest.mark.parametrize("name", ["llama:tiny", "gpt2:tiny"])  # the second ties its embedding
def test_it_holds_weights_states_gradients_and_temporaries(name: str) -> None:
    training = FakeTraining(
        config=config_of(parse_model(name)), training_state="device", optimizer_bytes=8
    )
    with training.model() as (model, _):
        sizes = [each.numel() for each in model.parameters()]
        buffers = sum(each.nbytes for each in model.buffers())
    program = record_step(training, 1, 64)
    held = (2 + 2 + 8) * sum(sizes) + buffers
    assert optimizer_step_bytes(program, FUSED) == held
    assert optimizer_step_bytes(program, FOREACH) == held + 2 * sum(sizes)
    assert optimizer_step_bytes(program, FOR_LOOP) == held + 2 * 2 * max(sizes)
    assert optimizer_step_bytes(program, FOREACH, has_moments=False) == held
    assert training.optimizer_step_bytes(program) == held


def test_an_optimizer_on_the_host_takes_nothing() -> None:
    training = FakeTraining(config=config_of(parse_model("llama:tiny")), training_state="host")
    program = record_step(training, 1, 64)
    assert training.optimizer_step_bytes(program) == 0
