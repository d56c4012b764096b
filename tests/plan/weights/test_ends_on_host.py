"""A recorded step with embeddings and head on the host: what is on the device, and when."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from transformers import AutoConfig

from hf_pyao.levers import Levers
from hf_pyao.plan.step.ends_on_host import ends_bytes, with_ends_on_host
from hf_pyao.plan.step.recorded_step import RecordedStep
from hf_pyao.plan.step.step_program import BACKWARD, FORWARD, OUTSIDE, StepProgram
from hf_pyao.plan.step.streamed_step import with_streamed_blocks
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.recorded_step import record_step

VOCAB, WIDTH, POSITIONS = 128, 64, 32
TABLE = VOCAB * WIDTH * 2
"""Bytes of an embedding or a head in 16 bits."""

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
    },
    "opt": {
        "hidden_size": WIDTH,
        "word_embed_proj_dim": WIDTH,
        "ffn_dim": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "max_position_embeddings": POSITIONS - 2,
        "vocab_size": VOCAB,
    },
}
ENDS = {"llama": 2 * TABLE, "opt": TABLE + POSITIONS * WIDTH * 2}
"""Untied; tied, with learned positions."""


@functools.cache
def recorded(model_type: str, head_loss: str) -> StepProgram:
    training = FakeTraining(
        config=AutoConfig.for_model(model_type, use_cache=False, **MODELS[model_type]),
        lora_rank=2,
        training_state="device",
        checkpointing=False,
    )
    return record_step(training, 2, 16, levers=Levers(head_loss=head_loss))


def live_bytes(program: StepProgram, operation: int) -> int:
    """Return what is there while *operation* runs."""
    there = (each for each in program.buffers if each.birth <= operation < each.death)
    return program.resident_bytes + sum(each.nbytes for each in there)


@pytest.mark.parametrize("head_loss", ["off", "chunked"])
@pytest.mark.parametrize("model_type", MODELS)
def test_layers_run_without_them_and_the_head_with_its_weight(
    model_type: str, head_loss: str
) -> None:
    program = recorded(model_type, head_loss)
    assert ends_bytes(program) == ENDS[model_type]
    changed = with_ends_on_host(program)
    assert changed.resident_bytes == program.resident_bytes - ENDS[model_type]
    assert with_ends_on_host(changed) is changed
    assert not ends_bytes(changed)
    last = max(n for n, s in enumerate(program.segments) if (s.phase, s.layer) == (FORWARD, 2))
    first = next(
        n for n, s in enumerate(program.segments) if s.phase == BACKWARD and s.layer != OUTSIDE
    )
    for number, segment in enumerate(program.segments):
        for operation in range(segment.start, segment.end):
            less = live_bytes(program, operation) - live_bytes(changed, operation)
            is_head = last < number < first
            assert less == ENDS[model_type] - is_head * TABLE, (segment, operation)


def test_layers_can_be_streamed_beside() -> None:
    program = recorded("llama", "off")
    layers = range(program.num_layers)
    both = with_streamed_blocks(with_ends_on_host(program), layers)
    streamed = with_streamed_blocks(program, layers)
    assert both.streamed == streamed.streamed
    assert streamed.resident_bytes - both.resident_bytes == ENDS["llama"]


def test_a_file_keeps_which_they_are() -> None:
    program = recorded("opt", "off")
    document = RecordedStep(program, program.layer_names, 0).to_dict()
    again = RecordedStep.from_dict(document).program
    assert ends_bytes(again) == ENDS["opt"]
