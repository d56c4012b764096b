"""Plans that may write slots in int8, judged by the engine itself on the simulated device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.codecs import get_codec
from hf_pyao.engine.runtime.policy import Offload, Policy, Situation
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.plan.hardware.presets import Hardware, find_hardware
from hf_pyao.plan.options.auto_plan import plan_of
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.predict.predict import operation_times_ms
from hf_pyao.plan.solve.planner import KEEP_ALL, OFFLOAD_ALL, Candidate, Planner
from hf_pyao.plan.solve.steering import LOSSY_GAIN
from hf_pyao.plan.step.step_program import ROW_STATISTIC, SlotUse
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_sizes import build_config, find_size
from hf_pyao.tools.estimate.recorded_step import record_step
from tests.helpers import EVERY_LAYER, tiny_batch, tiny_model
from tests.helpers.simulation.fake_peak import UNLIMITED_HOST_GIB
from tests.helpers.simulation.simulated_step import SimulatedStep, simulate_step

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
    dtypes = {slot.name: dtype_of(slot) for slot in program.slots}
    times_ms = operation_times_ms(program, hardware.device)
    return PlanRequest.of_config(config).planner_of(program, times_ms, hardware.link, dtypes)


def dtype_of(slot: SlotUse) -> str:
    """Return the dtype of a slot; of attention's, which have a row for each head, the model's."""
    values = MICRO_BATCH * LENGTH * max(1, slot.row_values)
    known = {values: "bool", 4 * values: "float32"}
    is_attention = slot.name.rpartition(":")[0] in ("self_attn", "attn")
    return "bfloat16" if is_attention else known.get(slot.nbytes, "bfloat16")


def judged(
    training: FakeTraining, hardware: Hardware, planner: Planner, chosen: Candidate, path: Path
) -> SimulatedStep:
    """Run the engine with a plan, on fake tensors and a virtual clock."""
    plan_of(planner, chosen).to_json_file(path)
    settings = PyAOConfig(
        policy="plan",
        plan=str(path),
        verify_recompute="off",  # fingerprints are no part of a plan
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
def test_the_engine_takes_the_time_and_the_memory_that_a_lossy_plan_predicts(
    model: str, gib_per_s: float, copy_engines: int, share: float, tmp_path: Path
) -> None:
    """Where what is lost is worth it, and where everything that leaves is written in int8."""
    training, hardware = training_of(model), hardware_of(gib_per_s, copy_engines)
    planner = planner_of(training, hardware, allow_lossy=True)
    limit = limit_of(planner, share)
    found = [planner.best(limit), planner.least()]
    planner = planner_of(training, hardware, allow_lossy=True)
    planner.conditions = dataclasses.replace(planner.conditions, may_recompute=False)
    everything = planner.simple()[OFFLOAD_ALL]
    leaving = [n for n, action in enumerate(everything.actions) if action == "offload"]
    for some in (leaving, leaving[::2]):
        actions = ["offload" if n in some else "keep" for n in range(len(everything.actions))]
        codecs = planner.lossy_codecs(some)
        found.append(planner.candidate("drawn", actions, codecs=codecs))
    for chosen in found:
        step = judged(training, hardware, planner, chosen, tmp_path / "plan.json")
        assert step.peak_bytes == chosen.timed.peak_bytes <= chosen.peak_bytes
        assert step.step_ms == pytest.approx(chosen.step_ms, rel=1e-6)
    assert "int8" in found[2].codecs


@pytest.mark.thorough
def test_statistics_of_rows_are_written_as_they_are() -> None:
    """Attention's logsumexp, of which a small error is one in a whole row of gradients."""
    training, hardware = training_of("opt"), hardware_of(1.0, 1)
    program = record_step(training, MICRO_BATCH, LENGTH)
    statistics = {slot.name for slot in program.slots if slot.row_values == ROW_STATISTIC}
    assert "self_attn:3" in statistics
    planner = planner_of(training, hardware, allow_lossy=True)
    codecs = planner.lossy_codecs(range(len(program.slots)))
    assert "int8" in codecs
    for slot, codec in zip(planner.program.slots, codecs, strict=True):
        assert slot.name not in statistics or codec is None


class Losing(Policy):
    """A policy of one's own that writes all in int8."""

    name = "losing"

    def decide(self, slot: Slot, situation: Situation) -> Offload:
        return Offload(get_codec("int8"))


def test_a_policy_that_asks_for_int8_does_what_the_setting_does() -> None:
    """Statistics of rows are left alone then too; in the first forward, more than they."""
    gradients = []
    for settings in ({"codec": "int8"}, {"policy": Losing()}, {"policy": "off"}):
        model = tiny_model("llama").train()
        config = dataclasses.replace(EVERY_LAYER, **settings)  # type: ignore[arg-type]
        with attach(model, config):
            for _ in range(2):
                model.zero_grad()
                model(**tiny_batch(), use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for coded, asked in zip(*gradients[:2], strict=True):
        assert torch.equal(coded, asked)
    assert any(not torch.equal(a, b) for a, b in zip(*gradients[1:], strict=True))
