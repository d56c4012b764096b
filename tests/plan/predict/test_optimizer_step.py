"""What is on the device while the optimizer steps."""

from __future__ import annotations

import dataclasses

import pytest

from hf_pyao.plan.hardware.beside_step import FOR_LOOP, FOREACH, FUSED
from hf_pyao.plan.predict.optimizer_step import optimizer_step_bytes
from hf_pyao.plan.predictor.steps import gradients_held
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

    def most(**how: object) -> int:
        changed = dataclasses.replace(training, **how)  # type: ignore[arg-type]
        return optimizer_step_bytes(changed.with_optimizer(program))

    held = (2 + 2 + 8) * sum(sizes) + buffers
    assert most(implementation=FUSED) == optimizer_step_bytes(program) == held
    assert most(implementation=FOREACH) == held + 2 * sum(sizes)
    assert most(implementation=FOR_LOOP) == held + 2 * 2 * max(sizes)
    assert most(implementation=FOREACH, optimizer_bytes=0) == held
    foreach = dataclasses.replace(training, implementation=FOREACH).with_optimizer(program)
    assert optimizer_step_bytes(gradients_held(foreach)) == held + 2 * sum(sizes)


def test_an_optimizer_on_the_host_allocates_nothing() -> None:
    config = config_of(parse_model("llama:tiny"))
    training = FakeTraining(config=config, training_state="host", implementation=FOREACH)
    program = record_step(training, 1, 64)
    assert optimizer_step_bytes(program) == 0
