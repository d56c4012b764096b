"""Plans of steps whose float32 weights are uploaded in the dtype of autocast.

Reference: bytes of slots, host and uploads of a run.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.recording.model_copy import CopiedStep
from hf_pyao.auto.recording.seen_forward import seen_forward
from hf_pyao.auto.recording.step_recording import record_fake_step
from hf_pyao.plan.step.recorded_step import RecordedStep
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.plan.step.streamed_step import (
    block_bytes,
    streamed_layers,
    with_converted_uploads,
    with_streamed_blocks,
)
from hf_pyao.plan.weights.weight_plan import weight_plan_of
from tests.helpers import autocasting, tiny_batch
from tests.helpers.adapters import tiny_lora

NUM_LAYERS = 6
BF16 = torch.bfloat16
ADAPTERS = {"lora": {}, "dora": {"use_dora": True, "target_modules": ["q_proj", "down_proj"]}}


def model_with(adapters: str) -> nn.Module:
    return tiny_lora("llama", num_hidden_layers=NUM_LAYERS, adapters=ADAPTERS[adapters]).train()


def recorded(adapters: str) -> StepProgram:
    with autocasting(BF16):
        step = CopiedStep(model_with(adapters), seen_forward((), tiny_batch(0)))
        return record_fake_step(step)[0].whole()


def converted_and_streamed(program: StepProgram, num_resident: int) -> StepProgram:
    layers = streamed_layers(NUM_LAYERS, NUM_LAYERS - num_resident)
    return with_streamed_blocks(with_converted_uploads(program), layers)


@pytest.mark.parametrize("num_resident", [0, 2])
@pytest.mark.parametrize("adapters", ADAPTERS)
def test_bytes_are_those_of_a_run(adapters: str, num_resident: int) -> None:
    program = converted_and_streamed(recorded(adapters), num_resident)
    weights = weight_plan_of(program)
    settings = PyAOConfig(
        policy="off", stream_weights=num_resident, stream_dtype="compute", host_memory_gib=0.1
    )
    model = model_with(adapters)
    uploaded = [0]
    with attach(model, settings) as offloader:
        ring = offloader.weights.ring
        for seed in range(3):
            with autocasting(BF16):
                loss = model(**tiny_batch(seed)).loss
            loss.backward()
            uploaded.append(ring.figures().uploaded_bytes)
        assert weights.slot_bytes == ring.slot_bytes
        assert weights.host_bytes == ring.counts.pool_bytes
    assert [b - a for a, b in pairwise(uploaded)][1:] == [weights.uploaded_bytes] * 2


def test_without_it_nothing_changes_and_the_device_has_less_by_what_is_stored() -> None:
    program = recorded("lora")
    layers = range(NUM_LAYERS)
    stored = with_streamed_blocks(program, layers)
    converted = with_streamed_blocks(with_converted_uploads(program), layers)
    masters = sum(block_bytes(program))
    assert stored.streamed.host_bytes == masters
    assert converted.streamed.host_bytes == 1.5 * masters
    assert sum(block_bytes(with_converted_uploads(program))) == 1.5 * masters
    assert converted.streamed.slot_bytes == stored.streamed.slot_bytes / 2
    for each in (stored, converted):
        gone = program.resident_bytes - each.resident_bytes
        assert gone == masters - each.streamed.device_bytes == each.streamed.saved_bytes


def test_a_file_keeps_what_can_be_converted() -> None:
    program = recorded("lora")
    document = RecordedStep(program, program.layer_names, 0).to_dict()
    again = RecordedStep.from_dict(document).program
    assert again.residents == program.residents
    assert any(each.converted_nbytes for each in again.residents)
