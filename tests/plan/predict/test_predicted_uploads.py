"""Uploads of streamed weights on the clock: counted, and judged by sums and by a recurrence.

The recurrence knows a block's upload and compute and nothing of segments, copies or clocks. The
virtual link of the simulation has a clock of its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_pyao.plan.hardware.host_model import IN_STEP
from hf_pyao.plan.hardware.speeds import GIB, LinkModel
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.step.prediction import Prediction
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

LINK = LinkModel(d2h_gib_per_s=UNIT * 1000 / GIB, h2d_gib_per_s=UNIT * 1000 / GIB)
"""A unit takes one ms."""


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


def time_of(program: StepProgram, times_ms: Sequence[float], **more: bool) -> Prediction:
    return predict(program, [], window_bytes=1, times_ms=times_ms, link=LINK, **more)


def by_recurrence(
    sizes: Sequence[int], streamed: Sequence[int], times_ms: Sequence[float], *, is_first: bool
) -> tuple[float, int]:
    """Return when the step ends, and how many blocks are uploaded in it.

    An upload begins when the lane is free and the block that was in the slot has been computed.
    """
    num = len(sizes)
    order = [*range(num), *reversed(range(num))]
    work = [*times_ms[1 : num + 1], *times_ms[num + 2 :]]
    visits = [place for place, block in enumerate(order) if block in streamed]
    there: dict[int, float] = {}
    computed: list[tuple[int, float]] = []
    lane = 0.0
    count = 0

    def upload(block: int, free: float) -> None:
        nonlocal lane, count
        lane = max(lane, free) + sizes[block]
        there[block] = lane
        count += 1

    for block in streamed[:2]:
        if is_first:
            upload(block, 0.0)
        else:
            there[block] = 0.0
    now = times_ms[0]
    for place, (block, elapsed) in enumerate(zip(order, work, strict=True)):
        if place == num:
            now += times_ms[num + 1]
        if block in streamed:
            now = max(now, there[block])
        now += elapsed
        if block in streamed:
            computed.append((block, now))
            ahead = [order[each] for each in visits if each > place]
            wanted = list(dict.fromkeys(ahead))[:2]
            for each in wanted:
                if each not in there:
                    (gone,) = {*there} - {*wanted}
                    del there[gone]
                    upload(each, now)
    return now, count


@pytest.mark.parametrize("seed", range(40))
def test_times_are_those_of_a_recurrence(seed: int) -> None:
    random = Random(seed)
    num = random.randint(3, 12)
    sizes = [random.randint(1, 40) for _ in range(num)]
    streamed = sorted(random.sample(range(num), random.randint(2, num)))
    times = [random.uniform(0.1, 40) for _ in range(2 * num + 2)]
    program = with_streamed_blocks(step_of(sizes), streamed)
    for is_first in (True, False):
        found = time_of(program, times, is_first_step=is_first)
        step_ms, count = by_recurrence(sizes, streamed, times, is_first=is_first)
        assert found.step_ms == pytest.approx(step_ms)
        assert found.num_uploads == count


@pytest.mark.parametrize("num_streamed", [1, 2, 3, 7, 32])
def test_blocks_at_the_turns_are_uploaded_once(num_streamed: int) -> None:
    program = with_streamed_blocks(step_of([4] * 32), streamed_layers(32, num_streamed))
    on_ring = min(2, num_streamed)
    first = time_of(program, [1.0] * 66, is_first_step=True)
    later = time_of(program, [1.0] * 66)
    assert first.num_uploads == 2 * num_streamed - on_ring
    assert later.num_uploads == 2 * (num_streamed - on_ring)
    assert later.uploaded_bytes == 4 * UNIT * later.num_uploads


def test_layers_that_fit_are_not_uploaded() -> None:
    program = step_of([4] * 8)
    assert with_streamed_blocks(program, ()) is program
    assert time_of(program, [1.0] * 18).num_uploads == 0


@pytest.mark.parametrize("seed", range(30))
def test_a_step_takes_what_the_slower_of_compute_and_link_takes(seed: int) -> None:
    """Within 2 %: of each pass the larger of compute and bytes, and one upload."""
    random = Random(seed)
    num, upload, forward = random.randint(24, 80), 100, random.uniform(10, 400)
    backward, head = forward * random.uniform(1, 3), forward * random.uniform(0, 3)
    num_streamed = random.choice([num, num, num // 2])
    times = [0.1, *[forward] * num, head, *[backward] * num]
    program = with_streamed_blocks(step_of([upload] * num), streamed_layers(num, num_streamed))
    lane = (num_streamed - 2) * upload
    expected = max(num * forward, lane) + head + max(num * backward, lane) + upload
    assert time_of(program, times).step_ms == pytest.approx(expected, rel=0.02)


def test_streamed_blocks_are_spread_over_the_depth() -> None:
    for num, streamed in ((32, 3), (32, 17), (32, 31), (80, 50)):
        found = streamed_layers(num, streamed)
        gaps = [b - a for a, b in itertools.pairwise((-1, *found, num))]
        assert len(found) == streamed
        assert max(gaps[1:-1]) - min(gaps[1:-1]) <= 1
    assert streamed_layers(5, 5) == (0, 1, 2, 3, 4)
    assert streamed_layers(5, 0) == ()


def test_the_ring_has_two_slots_of_the_largest_block() -> None:
    sizes = [3, 9, 4, 4, 4]
    resident = step_of(sizes)
    streamed = with_streamed_blocks(resident, (0, 2, 3))
    assert resident.resident_bytes - streamed.resident_bytes == (3 + 4 + 4 - 2 * 4) * UNIT
    assert sum(each.nbytes for each in streamed.residents) == streamed.resident_bytes - 2
    assert streamed.streamed.host_bytes == 11 * UNIT
    with pytest.raises(ValueError, match="already"):
        with_streamed_blocks(streamed, (1,))


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


def test_weights_share_the_lane_with_reloads_in_the_order_of_need() -> None:
    """Those of a layer come behind the reloads of the layer whose backward runs before."""
    program = with_streamed_blocks(recorded(), range(7))
    leaves = [slot.nbytes > 2**13 and slot.layer < 6 for slot in program.slots]
    layer_bytes = sum(
        slot.link_bytes
        for slot, is_out in zip(program.slots, leaves, strict=True)
        if is_out and slot.layer == 3
    )
    found = predict(
        program,
        leaves,
        window_bytes=int(1.5 * layer_bytes),
        host=IN_STEP,
        times_ms=[0.01] * program.num_operations,
        link=LinkModel(d2h_gib_per_s=50, h2d_gib_per_s=0.5),
    )
    turn = next(each.start for each in program.segments if each.phase == BACKWARD)
    lane = [
        each
        for each in found.copies
        if each.direction == "reload" and each.start_ms >= found.start_ms[turn]
    ]
    order = [
        (each.layer if each.layer >= 0 else program.slots[each.slot].layer, each.layer >= 0)
        for each in lane
    ]
    for layer in range(4, -1, -1):
        weights = order.index((layer, True))
        own = [place for place, each in enumerate(order) if each == (layer + 1, False)]
        behind = [place for place, each in enumerate(order) if each == (layer, False)]
        assert max(own) < weights < max(behind)
        # What the layer before had room for came then.
        assert sum(place > weights for place in behind) >= len(behind) / 3


def test_streamed_weights_are_not_in_a_recorded_document() -> None:
    from hf_pyao.plan.step.recorded_step import RecordedStep

    program = recorded()
    read = RecordedStep.from_dict(RecordedStep(program, program.layer_names, 0).to_dict())
    assert block_bytes(read.program) == block_bytes(program)
    unknown = replace(program, residents=())
    assert with_streamed_blocks(unknown, range(7)) is unknown
