"""Plans for steps in segments and tiles: what they leave to decide on, predicted as it runs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from hf_pyao import PyAOConfig
from hf_pyao.levers import Levers
from hf_pyao.plan.options.auto_plan import plan_of
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.predict.predict import operation_times_ms
from hf_pyao.plan.solve.planner import KEEP_ALL, OFFLOAD_ALL, Planner
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.recorded_step import record_step
from tests.helpers.hardware import HARDWARE
from tests.helpers.simulation.fake_peak import peak_of
from tests.helpers.simulation.simulated_step import simulate_step

MODEL = "llama:hidden_size=64,intermediate_size=256,num_hidden_layers=6,num_attention_heads=4,vocab_size=128"
MICRO_BATCH, LENGTH = 4, 64
INPUTS = Levers(checkpoint_every=1)
CASES = [
    Levers(checkpoint_every=1, save_attention=True),
    INPUTS,
    Levers(checkpoint_every=2),
    Levers(mlp_tiles=4, checkpoint_every=2),
    Levers(mlp_tiles=4, checkpoint_every=2, checkpoint_nested=True, save_attention=True),
    Levers(head_loss="chunked", mlp_tiles=4, checkpoint_every=1, save_attention=True),
]


@cache
def training() -> FakeTraining:
    return FakeTraining(config=config_of(parse_model(MODEL)))


@cache
def program_of(levers: Levers) -> StepProgram:
    return record_step(training(), MICRO_BATCH, LENGTH, levers=levers)


def config_with(levers: Levers, **settings: object) -> PyAOConfig:
    given = {
        "min_bytes": 4096,
        "window": 2**15,
        "host_memory_gib": 2.0**20,
        "verify_recompute": "off",  # fingerprints are no part of a plan
    }
    return PyAOConfig.from_dict({**given, **settings, **levers.settings()})


def planner_of(levers: Levers) -> Planner:
    program = program_of(levers)
    times_ms = operation_times_ms(program, HARDWARE.device)
    request = PlanRequest.of_config(config_with(levers))
    return request.planner_of(program, times_ms, HARDWARE.link, {})


@pytest.mark.thorough
@pytest.mark.parametrize("levers", CASES, ids=Levers.describe)
@pytest.mark.sampled(every=1000)
def test_what_is_left_is_kept_or_offloaded_as_predicted(levers: Levers, tmp_path: Path) -> None:
    """The real engine follows each plan on fake tensors, and comes to its time and its peak."""
    planner = planner_of(levers)
    simple = planner.simple()
    assert set(simple) == {KEEP_ALL, OFFLOAD_ALL}
    most, least = simple[KEEP_ALL].peak_bytes, planner.least().peak_bytes
    assert least < most
    between = planner.best((most + least) // 2)
    assert between.peak_bytes <= (most + least) // 2
    tightest = planner.best(least)
    assert between.step_ms <= tightest.step_ms
    for chosen in (between, tightest):
        assert set(chosen.actions) == {"keep", "offload"}
        assert chosen.step.rebuild_ms == 0
        plan_of(planner, chosen).to_json_file(tmp_path / "plan.json")
        settings = config_with(
            levers,
            policy="plan",
            plan=str(tmp_path / "plan.json"),
            keep_last_layers=chosen.keep_last_layers,
            window="layer" if chosen.window_bytes is None else chosen.window_bytes,
        )
        simulated = simulate_step(training(), settings, HARDWARE, MICRO_BATCH, LENGTH)
        assert simulated.offloaded_bytes == chosen.timed.offloaded_bytes > 0
        assert simulated.peak_bytes == chosen.timed.peak_bytes
        assert simulated.step_ms == pytest.approx(chosen.step_ms, rel=1e-6)
        found = peak_of(training(), settings, MICRO_BATCH, LENGTH)
        assert found.peak_bytes == chosen.peak_bytes


@pytest.mark.thorough
def test_the_last_segment_is_kept_as_a_whole() -> None:
    """As the engine does it, where the configuration keeps one layer."""
    levers = Levers(checkpoint_every=4)  # two segments, of four and of two layers
    planner = planner_of(levers)
    assert planner.conditions.keep_last_layers == 2
    actions = dict(
        zip(
            (s.layer for s in planner.program.slots),
            planner.simple()[OFFLOAD_ALL].actions,
            strict=True,
        )
    )
    assert actions == {0: "offload", 4: "keep"}
    settings = config_with(levers, policy="all")
    found = peak_of(training(), settings, MICRO_BATCH, LENGTH)
    assert found.peak_bytes == planner.simple()[OFFLOAD_ALL].peak_bytes
