"""Plans for recorded steps: predicted as they are recorded and run, within caps, never worse."""

from __future__ import annotations

import dataclasses
import math
import random
from functools import cache

import pytest

from hf_pyao.plan.documents.plan import Plan, PlannedSlot
from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.plan.options.auto_plan import plan_of
from hf_pyao.plan.paper.pyao_plan import paths_of
from hf_pyao.plan.predict.predict import operation_times_ms, predict
from hf_pyao.plan.solve.conditions import Conditions
from hf_pyao.plan.solve.planner import (
    CHECKPOINT,
    KEEP_ALL,
    OFFLOAD_ALL,
    NoPlanFitsError,
    Planner,
)
from hf_pyao.plan.solve.steering import MEASURED
from hf_pyao.plan.step.planned_step import StepPlanner
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_sizes import build_config, find_size
from hf_pyao.tools.estimate.recorded_step import record_step
from tests.helpers.simulation.replayed_step import replay_step

WINDOW = 64 * 2**20
MIN_BYTES = 65536
SIZES = {"opt": "1.3b", "gpt2": "0.8b", "llama": "1.2b"}


@cache
def training(architecture: str) -> FakeTraining:
    return FakeTraining(
        config=build_config(architecture, find_size(architecture, SIZES[architecture]))
    )


@cache
def program_of(architecture: str, micro_batch: int = 4) -> StepProgram:
    return record_step(training(architecture), micro_batch, 512)


def planner_of(architecture: str, device: str = "rtx4070", **conditions: object) -> Planner:
    hardware = find_hardware(device)
    program = program_of(architecture)
    link = dataclasses.replace(hardware.link, copy_engines=conditions.pop("copy_engines", 2))
    given = Conditions(link=link, window_bytes=WINDOW, **conditions)  # type: ignore[arg-type]
    return Planner(program, operation_times_ms(program, hardware.device), given)


def judged(planner: Planner, plan: Plan, architecture: str) -> tuple[float, int]:
    """Return time and peak of *plan*, recorded with the engine and replayed on a virtual clock."""
    program = record_step(training(architecture), 4, 512, plan=plan, is_whole=True)
    device = find_hardware("rtx4070").device
    planned = {
        (slot.name, layer): slot
        for slot in plan.slots
        for layer in (slot.layers if slot.layers is not None else range(program.num_layers))
    }
    leaves = []
    for slot in program.slots:
        entry = planned.get((slot.name, slot.layer))
        if entry is None:
            is_last = slot.layer == program.num_layers - 1
            leaves.append(slot.stays is None and slot.nbytes >= MIN_BYTES and not is_last)
        else:
            action = entry.otherwise if entry.action == "recompute" else entry.action
            leaves.append(action == "offload" and slot.nbytes >= MIN_BYTES)
    step = replay_step(
        program,
        leaves,
        times_ms=operation_times_ms(program, device),
        link=planner.conditions.link,
        window_bytes=WINDOW,
    )
    return step.step_ms, step.peak_bytes


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", SIZES)
@pytest.mark.sampled(every=1000)
def test_what_is_recomputed_is_predicted_as_it_is_recorded(architecture: str) -> None:
    """The engine's own search for recipes, and the one on the graph, come to the same step."""
    program, hardware = program_of(architecture), find_hardware("rtx4070")
    times_ms = operation_times_ms(program, hardware.device)
    stepper = StepPlanner(program, times_ms)
    names = sorted({s.name for s in program.slots if s.stays is None and s.nbytes >= MIN_BYTES})
    rng = random.Random(0)
    for _ in range(2):
        dropped = {name for name in names if rng.random() < 0.5}
        products = sorted({*paths_of(program), ""}) if rng.random() < 0.5 else []
        first_kept = program.num_layers - 1
        actions = [
            "keep"
            if slot.layer >= first_kept or (slot.nbytes < MIN_BYTES and slot.name not in dropped)
            else "recompute"
            if slot.name in dropped
            else "offload"
            for slot in program.slots
        ]
        step = stepper.plan(actions, products)
        plan = Plan(
            slots=[PlannedSlot(name=name, action="recompute") for name in sorted(dropped)],
            replayed_modules=products,
        )
        recorded = record_step(training(architecture), 4, 512, plan=plan, keep_last_layers=1)
        leaves = [s.nbytes >= MIN_BYTES and s.layer < first_kept for s in recorded.slots]
        recorded_ms = operation_times_ms(recorded, hardware.device)
        for link, ours_ms, theirs_ms in (
            (None, None, None),
            (hardware.link, times_ms, recorded_ms),
        ):
            found = predict(
                step.program,
                step.leaves,
                window_bytes=WINDOW,
                rebuilds=step.rebuilds,
                times_ms=ours_ms,
                link=link,
            )
            expected = predict(recorded, leaves, window_bytes=WINDOW, times_ms=theirs_ms, link=link)
            assert found.offloaded_bytes == expected.offloaded_bytes
            assert found.peak_bytes == expected.peak_bytes
            if link is not None:
                assert found.step_ms == pytest.approx(expected.step_ms, rel=1e-4)


FULLY_EVICTED = {"opt": 0.03, "gpt2": 0.08, "llama": 0.03}
"""Most that evicting everything may cost at an RTX 4070's ratio of compute to link."""


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", SIZES)
def test_everything_evicted_costs_little_as_the_simulation_judges_it(architecture: str) -> None:
    planner = planner_of(architecture)
    chosen = planner.best(planner.simple()[OFFLOAD_ALL].peak_bytes)
    kept_ms = planner.simple()[KEEP_ALL].step_ms
    step_ms, peak_bytes = judged(planner, plan_of(planner, chosen), architecture)
    assert step_ms / kept_ms - 1 <= FULLY_EVICTED[architecture]
    assert step_ms == pytest.approx(chosen.step_ms, rel=1e-4)
    assert peak_bytes == pytest.approx(chosen.timed.peak_bytes, rel=1e-3)


def test_when_everything_fits_nothing_is_done() -> None:
    planner = planner_of("opt")
    chosen = planner.best(1e15)
    assert chosen.name == KEEP_ALL
    plan = plan_of(planner, chosen)
    assert {slot.action for slot in plan.slots} == {"keep"}
    assert plan.otherwise == "keep"
    assert {slot.reason for slot in plan.slots} == {"everything fits"}


@pytest.mark.parametrize("architecture", SIZES)
@pytest.mark.sampled(every=3)
def test_no_plain_way_that_fits_is_faster(architecture: str) -> None:
    allocator = AllocatorSettings()
    planner = planner_of(architecture, speed_ratios=MEASURED, allocator=allocator)
    most, least = planner.kept.peak_bytes, planner.simple()[OFFLOAD_ALL].peak_bytes
    for share in (0.1, 0.4, 0.9):
        limit = least + share * (most - least)
        chosen = planner.best(limit)
        assert chosen.memory.fits(limit)
        plain = [*planner.simple().values(), *planner.first_layers_fitting(limit)]
        fitting = [each.step_ms for each in plain if each.memory.fits(limit)]
        assert chosen.step_ms <= min(fitting, default=math.inf) * (1 + 1e-6)


@pytest.mark.thorough
def test_what_cannot_be_had_is_named_with_the_least_possible() -> None:
    planner = planner_of("llama")
    with pytest.raises(NoPlanFitsError, match=r"fits 953\.7 MiB; the least is .* more") as caught:
        planner.best(1e9)
    assert planner.best(caught.value.least_peak_bytes).peak_bytes == caught.value.least_peak_bytes
    assert planner.least().keep_last_layers == 0


@pytest.mark.thorough
def test_what_is_given_binds() -> None:
    planner = planner_of("llama", may_shrink_window=False, may_keep_fewer=False)
    with pytest.raises(NoPlanFitsError):
        planner.best(1e9)
    least = planner.least()
    assert (least.window_bytes, least.keep_last_layers) == (WINDOW, 1)
    no_recompute = planner_of("gpt2", may_recompute=False)
    assert "recompute" not in no_recompute.least().actions
    assert CHECKPOINT not in no_recompute.simple()
    no_offload = planner_of("gpt2", may_offload=False)
    chosen = no_offload.best(no_offload.least().peak_bytes * 1.1)
    assert {*chosen.actions, *chosen.otherwise} <= {"keep", "recompute"}
    assert OFFLOAD_ALL not in no_offload.simple()


@pytest.mark.thorough
def test_a_full_host_is_heeded() -> None:
    hardware = find_hardware("rtx4070")
    program = program_of("gpt2")
    times_ms = operation_times_ms(program, hardware.device)
    conditions = Conditions(link=hardware.link, window_bytes=WINDOW)
    limit = 10**9
    planner = Planner(program, times_ms, conditions, host_limit_bytes=limit)
    free = Planner(program, times_ms, conditions).simple()[OFFLOAD_ALL]
    chosen = planner.best(free.peak_bytes * 1.1)
    assert chosen.host_bytes <= limit < free.host_bytes
