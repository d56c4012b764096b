"""Few of equal parts are recorded, and the step that comes of them is that of all."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig

from hf_pyao.auto.recording import step_recording
from hf_pyao.auto.recording.few_parts import few_parts
from hf_pyao.levers import Levers
from hf_pyao.model import gradient_buffer
from hf_pyao.plan.options.group_plan import GroupPlan
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.plan.step.step_recorder import StepRecorder
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.recorded_step import record_step


@pytest.mark.parametrize(("num_samples", "most_shown"), [(24, 3), (23, 8)])
def test_one_group_stands_for_those_of_its_size_alone(num_samples: int, most_shown: int) -> None:
    plan = GroupPlan(num_samples=num_samples, num_heads=1, num_sample_groups=8, num_head_groups=1)
    everything = [each.end_sample - each.first_sample for each in plan.groups()]
    recorder = StepRecorder()
    seen: list[tuple[int, int]] = []
    with FakeTensorMode(), few_parts(recorder):
        for each in plan.groups():
            seen.append((each.end_sample - each.first_sample, recorder.num_runs))
    assert len(seen) <= most_shown
    assert [size for size, runs in seen for _ in range(runs)] == everything
    assert recorder.num_runs == 1


def _recorded() -> StepProgram:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    levers = Levers(head_loss="chunked", attention_groups=4)
    return record_step(FakeTraining(config=config), 9, 64, levers=levers)


@pytest.mark.thorough
def test_the_step_takes_the_memory_and_the_arithmetic_of_the_one_with_all_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradient_buffer, "_BLOCK_ELEMENTS", 512)
    few = _recorded()
    monkeypatch.setattr(step_recording, "few_parts", lambda recorder: nullcontext())
    every = _recorded()
    assert few.num_operations < every.num_operations
    for leaves in (False, True):
        found = [
            predict(each, [leaves] * len(each.slots), window_bytes=2**20) for each in (few, every)
        ]
        assert found[0].peak_bytes == found[1].peak_bytes
    sums = [
        (
            sum(each.flops * each.num_runs for each in program.operations),
            sum(each.traffic_bytes * each.num_runs for each in program.operations),
            sum(each.is_kernel * each.num_runs for each in program.operations),
        )
        for program in (few, every)
    ]
    assert sums[0] == sums[1]
