"""A disk below the host on the virtual clock: what hides, what waits, and what is never read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from hf_pyao.plan.hardware.speeds import DiskModel, LinkModel
from hf_pyao.plan.predict.copy_lanes import OFFLOAD, RELOAD, Copy
from hf_pyao.plan.predict.disk_demand import DiskDemand, passes_ms
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.predict.predicted_disk import PredictedDisk
from hf_pyao.plan.step.prediction import Prediction
from hf_pyao.plan.step.step_program import BACKWARD, FORWARD, StepProgram
from hf_pyao.plan.step.streamed_step import with_streamed_blocks
from hf_pyao.plan.weights.weight_plan import weight_plan_of
from tests.plan.predict.test_predict import Case

GIB = 2**30
LINK = LinkModel(d2h_gib_per_s=100.0, h2d_gib_per_s=100.0)


class Clock:
    """Compute is where a test says; copies of a fast link end at once."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.waits: list[float] = []

    def end_of(self, copy: Copy) -> float:
        return copy.ready_ms

    def wait_until(self, until_ms: float, slot: int) -> None:
        self.waits.append(max(0.0, until_ms - self.now_ms))
        self.now_ms = max(self.now_ms, until_ms)


def disk_of(memory_gib: int, clock: Clock) -> PredictedDisk:
    model = DiskModel(
        write_gib_per_s=1.0, read_gib_per_s=2.0, host_bytes=0, memory_bytes=memory_gib * GIB
    )
    return PredictedDisk(model, clock)


def test_the_memory_in_front_of_it_fills_and_the_newest_are_not_read() -> None:
    clock = Clock()
    disk = disk_of(2, clock)
    for number in range(5):
        disk.offload(number, GIB, Copy(OFFLOAD, GIB, clock.now_ms, slot=number))
        clock.now_ms += 100.0
    # Two fit at once; each further one waits for the write that is 1,000 ms behind the one before.
    assert clock.waits == pytest.approx([800.0, 900.0, 900.0])
    assert disk.written_bytes == 5 * GIB
    clock.now_ms = 10_000.0
    ready = {}
    for number in reversed(range(5)):
        copy = Copy(RELOAD, GIB, clock.now_ms, slot=number)
        ready[number] = copy.ready_ms = disk.reload(number, copy)
    assert disk.read_bytes == 3 * GIB
    assert ready[4] == ready[3] == 10_000.0, "memory still has them"
    # Read ahead as soon as the first has left: 500 ms each, one behind the other.
    assert [ready[number] for number in (2, 1, 0)] == pytest.approx([10_500, 11_000, 11_500])


def test_a_link_without_a_disk_predicts_as_before(program: StepProgram) -> None:
    times_ms = [0.01] * program.num_operations
    leaves = [True] * len(program.slots)
    roomy = dataclasses.replace(
        LINK, disk=DiskModel(write_gib_per_s=1.0, read_gib_per_s=1.0, host_bytes=2**40)
    )
    found = [
        predict(program, leaves, window_bytes=2**20, times_ms=times_ms, link=link)
        for link in (LINK, roomy)
    ]
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def program() -> StepProgram:
    return Case("llama", keep_last_layers=0).program


def step_with(
    program: StepProgram, demand: float | None, times_ms: Sequence[float], memory_share: float = 0.1
) -> Prediction:
    """Predict the step with a disk that is asked for *demand* of its speed; None: without one."""
    leaves = [True] * len(program.slots)
    link = LINK
    if demand is not None:
        num_bytes = sum(slot.link_bytes for slot in program.slots)
        first = min(each.start for each in program.segments if each.phase == BACKWARD)
        forward_ms = sum(times_ms[:first])
        speeds = [
            num_bytes / GIB / (elapsed_ms / 1e3) / demand
            for elapsed_ms in (forward_ms, sum(times_ms) - forward_ms)
        ]
        disk = DiskModel(
            write_gib_per_s=speeds[0],
            read_gib_per_s=speeds[1],
            host_bytes=0,
            memory_bytes=int(memory_share * num_bytes),
        )
        link = dataclasses.replace(LINK, disk=disk)
    return predict(program, leaves, window_bytes=2**16, times_ms=times_ms, link=link)


def test_a_demand_of_80_percent_costs_no_more_than_5_percent(program: StepProgram) -> None:
    times_ms = [1.0] * program.num_operations
    plain = step_with(program, None, times_ms)
    within = step_with(program, 0.8, times_ms)
    assert within.step_ms <= 1.05 * plain.step_ms
    twice = step_with(program, 2.0, times_ms)
    assert 1.4 * plain.step_ms < twice.step_ms < 2.1 * plain.step_ms
    assert twice.stall_forward_ms > 0
    assert twice.stall_backward_ms > 0


def test_no_step_is_shorter_than_what_the_disk_does_for_weights_and_saved_tensors(
    program: StepProgram,
) -> None:
    streamable = [each._replace(is_streamable=True) for each in program.residents]
    program = dataclasses.replace(program, residents=tuple(streamable))
    program = with_streamed_blocks(program, range(program.num_layers))
    staging_bytes = program.streamed.slot_bytes
    streamed = dataclasses.replace(
        program.streamed, disk_layers=program.streamed.layers, staging_bytes=staging_bytes
    )
    both = dataclasses.replace(program, streamed=streamed)
    times_ms = [0.01] * program.num_operations
    leaves = [True] * len(program.slots)
    saved_bytes = sum(slot.link_bytes for slot in program.slots)
    memory_bytes = saved_bytes // 10
    read_bytes = weight_plan_of(both).disk_read_bytes
    assert read_bytes > 0
    disk = DiskModel(
        write_gib_per_s=0.5, read_gib_per_s=1.0, host_bytes=0, memory_bytes=memory_bytes
    )

    def step_ms(step: StepProgram, host_bytes: float) -> float:
        link = dataclasses.replace(LINK, disk=dataclasses.replace(disk, host_bytes=host_bytes))
        return predict(step, leaves, window_bytes=2**16, times_ms=times_ms, link=link).step_ms

    alone_ms = step_ms(program, 0), step_ms(both, 2**60)
    together_ms = step_ms(both, 0)
    busy_ms = sum(
        nbytes / GIB / speed * 1e3
        for nbytes, speed in (
            (saved_bytes, 0.5),
            (saved_bytes - memory_bytes, 1.0),
            (read_bytes - staging_bytes, 1.0),  # so much was read before the step began
        )
    )
    assert max(alone_ms) < busy_ms, "one that does both at once for nothing would be optimistic"
    # What stays in memory as each pass ends is all that it may save.
    assert busy_ms - memory_bytes / GIB / 0.5 * 1e3 <= together_ms
    assert together_ms <= 1.5 * sum(alone_ms)


@pytest.mark.parametrize(
    ("saved_gib", "weights_gib", "expected"),
    [
        (0, 0, (110.0, 220.0)),
        # 400 ms of writes and 200 of reads, of which a quarter is memory's.
        (0.4, 0, (300.0, 250.0)),
        (0.4, 0.1, (350.0, 300.0)),
        (0.1, 0, (110.0, 220.0)),
        (0, 0.5, (250.0, 250.0)),
    ],
)
def test_passes_in_which_copies_stand_in_the_way(
    saved_gib: float, weights_gib: float, expected: tuple[float, float]
) -> None:
    disk = DiskModel(
        write_gib_per_s=1.0, read_gib_per_s=2.0, host_bytes=0, memory_bytes=int(0.1 * GIB)
    )
    link = LinkModel(d2h_gib_per_s=10.0, h2d_gib_per_s=5.0, disk=disk)
    weights_bytes = int(weights_gib * GIB)
    found = passes_ms(
        forward_ms=100.0,
        backward_ms=200.0,
        link=link,
        offloaded_bytes=int(0.1 * GIB),
        demand=DiskDemand(
            saved_bytes=int(saved_gib * GIB),
            weights_bytes={FORWARD: weights_bytes, BACKWARD: weights_bytes},
        ),
    )
    assert found == pytest.approx(expected, rel=1e-5)
