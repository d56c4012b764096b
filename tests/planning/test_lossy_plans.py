"""Plans that may write slots in int8, judged by the engine itself on the simulated device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hf_pyao.config import PyAOConfig
from hf_pyao.estimate.fake_step import UNLIMITED_HOST_GIB, FakeTraining
from hf_pyao.estimate.model_sizes import build_config, find_size
from hf_pyao.estimate.recorded_step import record_step
from hf_pyao.estimate.simulated_step import SimulatedStep, simulate_step
from hf_pyao.hardware.presets import Hardware, find_hardware
from hf_pyao.planning.auto_plan import plan_of
from hf_pyao.planning.plan_request import PlanRequest
from hf_pyao.planning.planner import KEEP_ALL, LOSSY_GAIN, Candidate, Planner
from hf_pyao.planning.predict import operation_times_ms

WINDOW_BYTES = 2**20
MIN_BYTES = 4096
MICRO_BATCH, LENGTH = 4, 128


def hardware_of(gib_per_s: float, copy_engines: int) -> Hardware:
    """Return a card that is slow enough for a small model's copies to count."""
    card = find_hardware("rtx4070")
    device = dataclasses.replace(card.device, tflop_per_s=2.0, memory_gib_per_s=100.0)
    link = dataclasses.replace(
        card.link,
        d2h_gib_per_s=gib_per_s,
        h2d_gib_per_s=gib_per_s,
        latency_us=1.0,
        copy_engines=copy_engines,
    )
    return dataclasses.replace(card, device=device, link=link)


def planner_of(training: FakeTraining, hardware: Hardware, *, allow_lossy: bool) -> Planner:
    program = record_step(training, MICRO_BATCH, LENGTH)
    config = PyAOConfig(min_bytes=MIN_BYTES, window=WINDOW_BYTES, allow_lossy=allow_lossy)
    dtypes = {slot.name: "bfloat16" for slot in program.slots}
    times_ms = operation_times_ms(program, hardware.device)
    return PlanRequest.of_config(config).planner_of(program, times_ms, hardware.link, dtypes)


def judged(
    training: FakeTraining, hardware: Hardware, planner: Planner, chosen: Candidate, path: Path
) -> SimulatedStep:
    """Run the engine with a plan, on fake tensors and a virtual clock."""
    plan_of(planner, chosen).to_json_file(path)
    settings = PyAOConfig(
        policy="plan",
        plan=str(path),
        min_bytes=MIN_BYTES,
        window=chosen.window_bytes or "layer",
        keep_last_layers=chosen.keep_last_layers,
        host_memory_gib=UNLIMITED_HOST_GIB,
    )
    return simulate_step(training, settings, hardware, MICRO_BATCH, LENGTH)


CASES = [
    ("opt", 1.0, 1, 0.2),
    ("opt", 4.0, 2, 0.5),
    ("gpt2", 1.0, 1, 0.1),
    ("gpt2", 2.0, 2, 0.6),
    ("llama", 8.0, 1, 0.05),
]
"""Model, speed of the link in GiB/s, copy engines, and where the limit lies between the peaks."""


def training_of(model: str) -> FakeTraining:
    tokens = {"vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2}
    return FakeTraining(config=build_config(model, find_size(model, "tiny"), **tokens))


def limit_of(planner: Planner, share: float) -> float:
    peaks = [each.peak_bytes for each in planner.simple().values()]
    return min(peaks) + share * (planner.simple()[KEEP_ALL].peak_bytes - min(peaks))


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "gib_per_s", "copy_engines", "share"), CASES)
def test_leave_to_lose_makes_no_plan_slower(
    model: str, gib_per_s: float, copy_engines: int, share: float
) -> None:
    training, hardware = training_of(model), hardware_of(gib_per_s, copy_engines)
    exact, lossy = (
        planner_of(training, hardware, allow_lossy=allowed) for allowed in (False, True)
    )
    limit = limit_of(exact, share)
    assert limit == limit_of(lossy, share)
    without, chosen = exact.best(limit), lossy.best(limit)
    assert set(without.codecs) == {None}
    assert chosen.peak_bytes <= limit
    if set(chosen.codecs) == {None}:
        assert chosen.step_ms == without.step_ms
    else:
        assert chosen.step_ms * LOSSY_GAIN < without.step_ms


@pytest.mark.thorough
def test_a_slow_link_makes_losing_worth_it() -> None:
    """Where all must leave, and nothing may be computed again: a third of the bytes is faster."""
    training, hardware = training_of("opt"), hardware_of(0.25, 1)
    found = {}
    for allowed in (False, True):
        planner = planner_of(training, hardware, allow_lossy=allowed)
        planner.conditions = dataclasses.replace(planner.conditions, may_recompute=False)
        found[allowed] = planner.best(limit_of(planner, 0.1))
    assert "int8" in found[True].codecs
    assert found[True].step_ms * LOSSY_GAIN < found[False].step_ms


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "gib_per_s", "copy_engines", "share"), CASES)
def test_the_engine_keeps_the_cap_where_it_may_lose(
    model: str, gib_per_s: float, copy_engines: int, share: float, tmp_path: Path
) -> None:
    """Of times it says nothing: it charges int8's arithmetic operation by operation.

    On a GPU that is one kernel each way, which is what the plan counts on.
    """
    training, hardware = training_of(model), hardware_of(gib_per_s, copy_engines)
    planner = planner_of(training, hardware, allow_lossy=True)
    limit = limit_of(planner, share)
    for chosen in (planner.best(limit), planner.proposal(0)):
        assert chosen is not None
        step = judged(training, hardware, planner, chosen, tmp_path / "plan.json")
        assert step.peak_bytes <= chosen.peak_bytes
        if set(chosen.codecs) == {None}:
            assert step.step_ms == pytest.approx(chosen.step_ms, rel=1e-3)
