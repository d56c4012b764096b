"""Recorded steps whose attention runs in groups: what they save, and what their peak is."""

from __future__ import annotations

from functools import cache

import pytest

from hf_pyao import PyAOConfig
from hf_pyao.levers import Levers
from hf_pyao.plan.hardware.speeds import DeviceModel, LinkModel
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.predict.predict import operation_times_ms
from hf_pyao.plan.solve.planner import KEEP_ALL, OFFLOAD_ALL
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.recorded_step import record_step
from tests.helpers.simulation.fake_peak import peak_of

MODEL = (
    "llama:hidden_size=64,intermediate_size=128,num_hidden_layers=4,num_attention_heads=8,"
    "num_key_value_heads=2,vocab_size=128"
)
MICRO_BATCH, LENGTH = 4, 8192
DEVICE = DeviceModel(tflop_per_s=0.05, memory_gib_per_s=2.0, launch_us=1.0)
LINK = LinkModel(d2h_gib_per_s=0.3, h2d_gib_per_s=0.3)
SETTINGS = {"min_bytes": 4096, "window": 2**20, "host_memory_gib": 2.0**20}
BACKWARD = "_scaled_dot_product_flash_attention_backward"


@cache
def training() -> FakeTraining:
    return FakeTraining(config=config_of(parse_model(MODEL)))


@cache
def program_of(levers: Levers) -> StepProgram:
    return record_step(training(), MICRO_BATCH, LENGTH, levers=levers)


@pytest.mark.parametrize("groups", [2, 4, 8])
@pytest.mark.parametrize("segments", [{}, {"checkpoint_every": 1, "save_attention": True}])
def test_the_same_is_saved_and_workspaces_are_of_one_group(
    groups: int, segments: dict[str, int | bool]
) -> None:
    plain = program_of(Levers(**segments))  # type: ignore[arg-type]
    divided = program_of(Levers(attention_groups=groups, **segments))  # type: ignore[arg-type]
    for field in ("name", "layer", "nbytes", "link_bytes", "stays"):
        assert [getattr(slot, field) for slot in divided.slots] == [
            getattr(slot, field) for slot in plain.slots
        ]
    calls = [op for op in plain.operations if op.name == BACKWARD]
    of_groups = [op for op in divided.operations if op.name == BACKWARD]
    assert sum(op.num_runs for op in of_groups) == groups * len(calls)
    inside = max(op.workspace_bytes for op in of_groups)
    copied = 2 * MICRO_BATCH * LENGTH * 64 * 2 // groups if groups > MICRO_BATCH else 0
    assert inside == calls[0].workspace_bytes // groups + copied
    flops = sum(op.flops * op.num_runs for op in of_groups)
    assert flops == pytest.approx(sum(op.flops for op in calls))


@pytest.mark.thorough
@pytest.mark.parametrize("groups", [2, 8])
def test_what_leaves_and_what_stays_come_to_their_peaks(groups: int) -> None:
    """By the engine on fake tensors."""
    levers = Levers(attention_groups=groups)
    program = program_of(levers)
    config = PyAOConfig(attention_groups=groups, **SETTINGS)  # type: ignore[arg-type]
    request = PlanRequest.of_config(config)
    planner = request.planner_of(program, operation_times_ms(program, DEVICE), LINK, {})
    for name, policy in ((KEEP_ALL, "off"), (OFFLOAD_ALL, "all")):
        candidate = planner.simple()[name]
        settings = config.with_settings(policy=policy)
        found = peak_of(training(), settings, MICRO_BATCH, LENGTH)
        assert found.peak_bytes == candidate.peak_bytes, name
