"""Streamed blocks on a disk, on the clock: bounds, and a simulation piece by piece.

The simulation knows bytes, slots and three lanes that move one unit after another, and nothing of
copies or queues.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from random import Random

import pytest

from hf_pyao.plan.hardware.speeds import GIB, DiskModel, LinkModel
from hf_pyao.plan.predict.copy_lanes import RELOAD, Copy, TimedLanes
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.step.disk_share import disk_share, with_blocks_on_disk
from hf_pyao.plan.step.prediction import Prediction
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.plan.step.streamed_step import streamed_layers, with_streamed_blocks
from hf_pyao.plan.weights.weight_plan import figures_of, said_of, weight_plan_of
from tests.plan.predict.test_predicted_uploads import UNIT, step_of

SPEED = UNIT * 1000 / GIB
"""A unit takes one ms."""


def link_with(disk_units_per_ms: float | None) -> LinkModel:
    speed = None if disk_units_per_ms is None else SPEED * disk_units_per_ms
    disk = None if speed is None else DiskModel(read_gib_per_s=speed)
    return LinkModel(d2h_gib_per_s=SPEED, h2d_gib_per_s=SPEED, disk=disk)


def on_disk(num: int, size: int, num_on_disk: int, staging: int) -> StepProgram:
    """Return a step with *num* streamed layers of *size* units, of which some are on the disk."""
    program = with_streamed_blocks(step_of([size] * num), streamed_layers(num, num))
    layers = tuple(range(0, num, num // num_on_disk))[:num_on_disk]
    streamed = dataclasses.replace(
        program.streamed, disk_layers=layers, staging_bytes=staging * UNIT
    )
    return dataclasses.replace(program, streamed=streamed)


def step_ms(program: StepProgram, times: Sequence[float], link: LinkModel) -> float:
    found: Prediction = predict(program, [], window_bytes=1, times_ms=times, link=link)
    return found.step_ms


@pytest.mark.parametrize("share", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("every", [1, 2, 4])
def test_a_demand_of_up_to_four_fifths_of_the_disk_costs_up_to_a_twentieth(
    share: float, every: int
) -> None:
    num, size, compute = 48, 100, 250.0
    times = [1.0, *[compute] * num, 1.0, *[compute] * num]
    program = on_disk(num, size, num // every, staging=2 * size)
    step = step_ms(program, times, link_with(None))
    disk_units = 2 * size * (num // every)
    speed = disk_units / step / share
    slowed = step_ms(program, times, link_with(speed))
    assert step <= slowed <= 1.05 * step


def by_units(
    sizes: Sequence[int], ready: Sequence[float], staging: int, disk: float
) -> list[float]:
    """Return when copies of blocks end that are ready one after the other, unit by unit.

    A unit is read when the disk is free and the unit *staging* before it was copied; it is copied
    when it was read, its block is ready, and the unit before was copied.
    """
    read_ms, copied_ms = -staging / disk, -1e9
    copied: list[float] = []
    ends = []
    for size, at in zip(sizes, ready, strict=True):
        for _ in range(size):
            number = len(copied)
            room = copied[number - staging] if number >= staging else -1e9
            read_ms = max(read_ms, room) + 1 / disk
            copied_ms = max(copied_ms, read_ms, at) + 1
            copied.append(copied_ms)
        ends.append(copied_ms)
    return ends


@pytest.mark.parametrize("seed", range(30))
def test_copies_end_when_a_simulation_of_their_units_says(seed: int) -> None:
    draw = Random(seed)
    sizes = [draw.randint(20, 60) for _ in range(12)]
    staging = draw.choice([20, 60, 150])
    disk = draw.choice([0.3, 0.7, 1.0, 2.5])
    ready, now = [], 0.0
    for _ in sizes:
        now += draw.uniform(0, 120)
        ready.append(now)
    lanes = TimedLanes(link_with(disk))
    copies = [
        Copy(RELOAD, size * UNIT, at, staging_bytes=staging * UNIT)
        for size, at in zip(sizes, ready, strict=True)
    ]
    for copy in copies:
        lanes.book(copy)
    found = [lanes.wait(copy, 0.0) for copy in copies]
    expected = by_units(sizes, ready, staging, disk)
    longest = max(sizes) / min(1.0, disk)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=0.1 * longest), (seed, found, expected)
    assert found[-1] == pytest.approx(expected[-1], rel=0.02)


def test_other_copies_pass_while_a_block_waits_for_the_disk() -> None:
    lanes = TimedLanes(link_with(0.1))
    from_disk = Copy(RELOAD, 100 * UNIT, 0.0, staging_bytes=10 * UNIT)
    other = Copy(RELOAD, 10 * UNIT, 1.0)
    lanes.book(from_disk)
    lanes.book(other)
    assert lanes.wait(other, 0.0) == pytest.approx(11.0)
    # Its first bytes, which the host has, go behind the other copy; the disk reads the rest.
    assert lanes.wait(from_disk, 0.0) == pytest.approx(11.0 + 900.0, rel=0.01)


def test_layers_on_the_host_are_spread_and_as_many_as_fit() -> None:
    share = disk_share([100] * 20, 1e9)
    assert share.layers == ()
    share = disk_share([10 * 2**20] * 20, 120 * 2**20)
    on_host = [layer for layer in range(20) if layer not in share.layers]
    assert share.staging_bytes <= 120 * 2**20 / 4
    assert len(on_host) * 10 * 2**20 + share.reserved_bytes <= 0.7 * 120 * 2**20
    assert (len(on_host) + 1) * 10 * 2**20 + share.reserved_bytes > 0.7 * 120 * 2**20
    gaps = [b - a for a, b in itertools.pairwise(on_host)]
    assert max(gaps) - min(gaps) <= 1
    assert len(disk_share([100] * 4, 10).layers) == 4


def test_plans_say_what_is_on_the_disk() -> None:
    program = with_streamed_blocks(step_of([400] * 12), range(12))
    placed = with_blocks_on_disk(program, 2000 * UNIT)
    plan = weight_plan_of(placed)
    assert plan.disk_bytes == len(plan.disk_layers) * 400 * UNIT
    assert plan.host_bytes <= 2000 * UNIT
    assert 0 < plan.disk_read_bytes <= 2 * plan.disk_bytes
    assert "disk" in str(plan)
    assert "disk_path" in said_of(figures_of(plan))
    assert with_blocks_on_disk(program, 1e12) is program
    assert "disk" not in said_of(figures_of(weight_plan_of(program)))
