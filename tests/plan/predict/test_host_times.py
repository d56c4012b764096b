"""The host's time in predicted steps: plans that Python is too slow for, and what replaces them."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_pyao import PyAOConfig
from hf_pyao.levers import Levers
from hf_pyao.plan.hardware.host_model import HostCosts
from hf_pyao.plan.options.auto_plan import describe, plan_of
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.predict.host_times import SLOWEST, host_costs_of, host_times_ms
from hf_pyao.plan.predict.predict import operation_times_ms
from hf_pyao.plan.solve.candidate import PLANNED
from hf_pyao.plan.solve.planner import (
    CHECKPOINT,
    FIRST_CHECKPOINTED,
    FIRST_RUN_AGAIN,
    Planner,
)
from hf_pyao.plan.solve.steering import MEASURED
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.recorded_step import record_step
from tests.helpers.hardware import HARDWARE
from tests.helpers.simulation.simulated_step import simulate_step

MODELS = {
    "opt": "opt:hidden_size=48,ffn_dim=192,num_hidden_layers=4,num_attention_heads=4,"
    "vocab_size=96,word_embed_proj_dim=48",
    "llama": "llama:hidden_size=48,intermediate_size=144,num_hidden_layers=5,"
    "num_attention_heads=4,vocab_size=96",
}
MICRO_BATCH, LENGTH = 3, 96
SETTINGS: dict[str, Any] = {"min_bytes": 4096, "window": 2**16}


@cache
def training(name: str) -> FakeTraining:
    return FakeTraining(config=config_of(parse_model(MODELS[name])))


@cache
def program_of(name: str) -> StepProgram:
    return record_step(training(name), MICRO_BATCH, LENGTH, levers=Levers())


@cache
def planner_of(host: HostCosts | None, name: str = "opt") -> Planner:
    program = program_of(name)
    times_ms = operation_times_ms(program, HARDWARE.device)
    request = PlanRequest.of_config(PyAOConfig(**SETTINGS))
    return request.planner_of(
        program, times_ms, HARDWARE.link, {}, host=host, speed_ratios=MEASURED
    )


def between(planner: Planner) -> float:
    """Return a limit that checkpointing of some layers meets."""
    least = planner.simple()[CHECKPOINT].peak_bytes
    return least + 0.4 * (planner.kept.peak_bytes - least)


def test_a_host_that_is_no_limit_changes_no_plan() -> None:
    plain, hosted = planner_of(None), planner_of(HostCosts().scaled(1e-4))
    limit = between(plain)
    without, with_host = plain.best(limit), hosted.best(limit)
    assert with_host.actions == without.actions
    assert with_host.step_ms == without.step_ms
    assert with_host.num_checkpointed == 0


def test_a_host_that_is_too_slow_lets_layers_run_again_as_a_whole() -> None:
    """Where to trace and to move costs the host much, as few layers as fit are checkpointed."""
    costs = dataclasses.replace(HostCosts().scaled(4.0), move_ms=8.0)
    plain, hosted = planner_of(None), planner_of(costs)
    limit = between(plain)
    traced = hosted.again(plain.best(limit))
    assert traced.name == PLANNED
    assert traced.step_ms > 1.5 * plain.best(limit).step_ms
    waited_ms = traced.timed.host_forward_ms + traced.timed.host_backward_ms
    assert traced.step_ms == pytest.approx(traced.timed.compute_ms + waited_ms, rel=0.02)
    best = hosted.best(limit)
    assert best.name == FIRST_RUN_AGAIN
    assert 0 < best.num_checkpointed < plain.program.num_layers
    assert best.step_ms < traced.step_ms
    fewer = hosted.of_first_layers(FIRST_RUN_AGAIN, best.num_checkpointed - 1)
    assert fewer is None or not fewer.memory.fits(limit)


def test_where_layers_may_not_run_again_none_do() -> None:
    request = PlanRequest.of_config(PyAOConfig(checkpoint_every=0, **SETTINGS))
    program = program_of("opt")
    times_ms = operation_times_ms(program, HARDWARE.device)
    planner = request.planner_of(program, times_ms, HARDWARE.link, {}, host=HostCosts())
    assert planner.fewest_run_again(between(planner)) is None


def test_the_device_is_not_through_with_a_segment_before_the_host() -> None:
    """Of a step whose layers each take the host so long, that is what the step takes."""
    candidate = planner_of(HostCosts().scaled(100.0)).simple()[CHECKPOINT]
    plain = planner_of(None).simple()[CHECKPOINT]
    assert plain.timed.host_forward_ms == plain.timed.host_backward_ms == 0.0
    assert candidate.timed.host_forward_ms > 10 * plain.step_ms
    assert candidate.timed.host_backward_ms > 10 * plain.step_ms
    host_ms = host_times_ms(candidate.step, HostCosts().scaled(100.0))
    assert sum(host_ms) <= candidate.step_ms <= sum(host_ms) + plain.step_ms
    assert candidate.peak_bytes == plain.peak_bytes


@pytest.mark.parametrize(("measured_ms", "factor"), [(None, None), (1.0, 1.0), (1e9, SLOWEST)])
def test_a_measured_layer_says_how_fast_the_host_is(
    measured_ms: float | None, factor: float | None
) -> None:
    program = program_of("opt")
    first = next(each for each in program.segments if each.layer == 0)
    leaving = [s for s in program.slots if s.layer == 0 and s.stays is None and s.nbytes >= 4096]
    costs = HostCosts()
    expected_ms = costs.hooks_ms + len(leaving) * costs.move_ms
    expected_ms += (first.end - first.start) * costs.op_ms
    host = {} if measured_ms is None else {"layer_forward_ms": measured_ms * expected_ms}
    profile: Any = SimpleNamespace(host=host, settings={"min_bytes": 4096})
    found = host_costs_of(profile, program)
    if factor is None:
        assert found is None
        return
    assert found is not None
    assert found.trace_ms == pytest.approx(factor * costs.trace_ms)
    assert not found.checkpoints_all


@pytest.mark.parametrize("name", ["llama", pytest.param("opt", marks=pytest.mark.thorough)])
def test_the_engine_comes_to_what_is_predicted_of_layers_that_run_again(
    name: str, tmp_path: Path
) -> None:
    """Some layers of a step run again, the others are kept: its time, and no more memory."""
    planner = planner_of(None, name)
    chosen = planner.of_first_layers(FIRST_RUN_AGAIN, 3)
    traced = planner.of_first_layers(FIRST_CHECKPOINTED, 3)
    assert chosen is not None
    assert traced is not None
    plan = plan_of(planner, chosen)
    assert plan.num_checkpointed == 3
    assert not {layer for slot in plan.slots for layer in slot.layers or ()} & {0, 1, 2}
    assert "the first 3 layers run again, nothing is offloaded" in describe(plan)
    plan.to_json_file(tmp_path / "plan.json")
    settings = PyAOConfig(
        policy="plan",
        plan=str(tmp_path / "plan.json"),
        keep_last_layers=1,
        host_memory_gib=2.0**20,
        verify_recompute="off",
        **SETTINGS,
    )
    simulated = simulate_step(training(name), settings, HARDWARE, MICRO_BATCH, LENGTH)
    assert simulated.offloaded_bytes == 0
    assert simulated.step_ms == pytest.approx(chosen.step_ms, rel=1e-6)
    assert simulated.step_ms > traced.step_ms  # tracing runs nothing in vain
    assert 0.9999 * chosen.peak_bytes <= simulated.peak_bytes <= chosen.peak_bytes
    assert chosen.peak_bytes < planner.kept.peak_bytes
