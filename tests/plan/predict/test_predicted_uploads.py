"""Uploads of streamed weights on the clock: counted, and judged by a simulation.

The virtual link of the simulation has a clock of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_pyao.plan.hardware.speeds import LinkModel
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.step.step_program import (
    BACKWARD,
    FORWARD,
    OUTSIDE,
    Operation,
    Resident,
    Segment,
    StepProgram,
)
from hf_pyao.plan.step.streamed_step import block_bytes, streamed_layers, with_streamed_blocks
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.recorded_step import record_step
from tests.helpers.simulation.replayed_step import replay_step

UNIT = 512
"""Weights start at multiples of so many bytes."""


def step_of(sizes: Sequence[int]) -> StepProgram:
    """Return a step of one operation a layer and pass: embedding, layers, head, layers again.

    Args:
        sizes: of the layers' weights, in units.
    """
    num = len(sizes)
    parts = [
        (FORWARD, OUTSIDE),
        *((FORWARD, layer) for layer in range(num)),
        (FORWARD, OUTSIDE),
        *((BACKWARD, layer) for layer in reversed(range(num))),
    ]
    return StepProgram(
        [Operation("mm", "", 0.0, 0, is_kernel=True) for _ in parts],
        [],
        [],
        [Segment(*part, number, number + 1) for number, part in enumerate(parts)],
        sum(sizes) * UNIT + 7,
        tuple(f"layers.{n}" for n in range(num)),
        residents=(
            Resident(OUTSIDE, 5, is_streamable=True),
            *(Resident(n, size * UNIT, is_streamable=True) for n, size in enumerate(sizes)),
        ),
    )


# ---- steps of models ---------------------------------------------------------------------------


def config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        use_cache=False,
    )


@functools.cache
def recorded(*, checkpointing: bool = False) -> StepProgram:
    training = FakeTraining(
        config=config(), lora_rank=2, training_state="device", checkpointing=checkpointing
    )
    return record_step(training, 2, 64)


def test_a_block_is_the_frozen_weights_of_a_layer() -> None:
    with torch.device("meta"):
        layers = LlamaForCausalLM(config()).to(torch.bfloat16).model.layers
    # Adapters come beside: all that the layers of the model itself have is frozen. Norms stay.
    assert list(block_bytes(recorded())) == [
        sum(parameter.nbytes for parameter in each.parameters() if parameter.dim() > 1)
        for each in layers
    ]


@pytest.mark.parametrize("copy_engines", [1, 2])
@pytest.mark.parametrize("num_streamed", [7, 4])
@pytest.mark.parametrize("window_bytes", [None, 2**18, 2**22])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_another_clock_says_the_same(
    checkpointing: bool, window_bytes: int | None, num_streamed: int, copy_engines: int
) -> None:
    resident = recorded(checkpointing=checkpointing)
    program = with_streamed_blocks(resident, streamed_layers(7, num_streamed))
    random = Random(num_streamed)
    for _ in range(4):
        speeds = {f"{way}_gib_per_s": random.uniform(0.2, 4) for way in ("d2h", "h2d")}
        link = LinkModel(**speeds, copy_engines=copy_engines)
        times = [random.uniform(0.001, 0.02) for _ in program.operations]
        leaves = [slot.nbytes > 2**13 and slot.layer < 6 for slot in program.slots]
        found = predict(program, leaves, window_bytes=window_bytes, times_ms=times, link=link)
        judge = replay_step(program, leaves, window_bytes=window_bytes, times_ms=times, link=link)
        assert found.step_ms == pytest.approx(judge.step_ms, rel=1e-6)
        assert found.peak_bytes == judge.peak_bytes
        assert found.num_uploads == 2 * (num_streamed - 2)


def test_memory_falls_by_the_blocks_and_rises_by_the_ring() -> None:
    resident = recorded()
    leaves = [False] * len(resident.slots)
    before = predict(resident, leaves, window_bytes=2**20)
    program = with_streamed_blocks(resident, streamed_layers(7, 7))
    after = predict(program, leaves, window_bytes=2**20)
    block = block_bytes(resident)[0]
    assert before.peak_bytes - after.peak_bytes == 7 * block - 2 * block
    assert [a - b for a, b in zip(before.live_bytes, after.live_bytes, strict=True)] == [
        5 * block
    ] * len(before.live_bytes)


def test_streamed_weights_are_not_in_a_recorded_document() -> None:
    from hf_pyao.plan.step.recorded_step import RecordedStep

    program = recorded()
    read = RecordedStep.from_dict(RecordedStep(program, program.layer_names, 0).to_dict())
    assert block_bytes(read.program) == block_bytes(program)
    unknown = replace(program, residents=())
    assert with_streamed_blocks(unknown, range(7)) is unknown
