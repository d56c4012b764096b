"""Collectives in a predicted step: beside compute, which waits for them where it needs them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from hf_pyao.errors import ConfigError
from hf_pyao.plan.hardware.speeds import GIB, DeviceModel, LinkModel
from hf_pyao.plan.predict.calibration import times_like
from hf_pyao.plan.predict.predict import operation_times_ms, predict
from hf_pyao.plan.solve.correction import Correction
from hf_pyao.plan.step.recorded_step import RecordedStep
from hf_pyao.plan.step.step_program import (
    BACKWARD,
    FORWARD,
    Collective,
    Operation,
    Segment,
    StepProgram,
)
from tests.helpers.simulation.replayed_step import replay_step

LINK = LinkModel(d2h_gib_per_s=10.0, h2d_gib_per_s=10.0)
GATHER, REDUCE = Collective(GIB, is_gather=True), Collective(2 * GIB, is_gather=False)


def kernel(awaits: int = 0) -> Operation:
    return Operation("mm", "", 1e9, 0, True, awaits=awaits)


def sends(collective: Collective, awaits: int = 0) -> Operation:
    return Operation("collective", "", 0.0, 0, True, collective=collective, awaits=awaits)


def program_of(operations: Sequence[Operation]) -> StepProgram:
    """Return a step without slots: the first half is forward."""
    turn, end = len(operations) // 2, len(operations)
    segments = (Segment(FORWARD, 0, 0, turn), Segment(BACKWARD, 0, turn, end))
    return StepProgram(tuple(operations), (), (), segments, 0, ("layer",))


def times_of(operations: Sequence[Operation], *, compute: float, gather: float) -> list[float]:
    """Return times in ms: of compute, and of a gather; a reduction takes twice as long."""
    return [
        compute if each.collective is None else gather * each.collective.nbytes / GATHER.nbytes
        for each in operations
    ]


def step_ms(operations: Sequence[Operation], *, compute: float, gather: float) -> float:
    program = program_of(operations)
    times_ms = times_of(operations, compute=compute, gather=gather)
    found = predict(program, [], window_bytes=0, times_ms=times_ms, link=LINK)
    assert found.step_ms == pytest.approx(
        found.compute_ms + found.collective_forward_ms + found.collective_backward_ms
    )
    return found.step_ms


def test_without_a_speed_collectives_take_no_time() -> None:
    operations = [sends(GATHER), kernel(1), sends(REDUCE)]
    program = program_of(operations)
    device = DeviceModel(tflop_per_s=1.0, memory_gib_per_s=1.0)
    times_ms = operation_times_ms(program, device)
    assert [times_ms[0], times_ms[2]] == [0.0, 0.0]
    assert times_ms[1] > 0
    fast = dataclasses.replace(device, collective_gib_per_s=500.0)
    assert operation_times_ms(program, fast) == [2.0, times_ms[1], 4.0]


def test_a_speed_of_no_use_is_refused() -> None:
    with pytest.raises(ConfigError, match="collective_gib_per_s"):
        DeviceModel(tflop_per_s=1.0, memory_gib_per_s=1.0, collective_gib_per_s=0.0)


def test_other_levers_keep_the_speed_of_collectives_and_corrections_too() -> None:
    before = program_of([sends(GATHER), kernel(1)])
    after = program_of([kernel(), sends(REDUCE), kernel(1)])
    assert times_like([5.0, 1.0], before, after)[1] == pytest.approx(10.0)
    assert Correction(compute=3.0).times_ms(before, [5.0, 1.0]) == [5.0, 3.0]


def test_a_recorded_step_is_read_back_with_its_collectives() -> None:
    program = program_of([sends(GATHER), kernel(1)])
    step = RecordedStep(program, program.layer_names, 0)
    assert RecordedStep.from_dict(step.to_dict()).program.operations == program.operations


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled(every=5)
def test_the_replay_takes_as_long_as_the_prediction(seed: int) -> None:
    """The judge's clock reckons collectives in a way of its own."""
    random_ = random.Random(seed)
    operations: list[Operation] = []
    num_queued = 0
    for _ in range(60):
        awaits = random_.randint(1, num_queued) if num_queued and random_.random() < 0.3 else 0
        if random_.random() < 0.3:
            nbytes = random_.randint(1, GIB)
            given = Collective(nbytes, is_gather=random_.random() < 0.5)
            operations.append(sends(given, 0 if given.is_gather else awaits))
            num_queued += 1
        else:
            operations.append(kernel(awaits))
    program = program_of(operations)
    times_ms = times_of(operations, compute=random_.uniform(0.1, 1), gather=random_.uniform(0.1, 1))
    found = predict(program, [], window_bytes=0, times_ms=times_ms, link=LINK)
    judge = replay_step(program, [], times_ms=times_ms, link=LINK, window_bytes=0)
    assert judge.step_ms == pytest.approx(found.step_ms)
