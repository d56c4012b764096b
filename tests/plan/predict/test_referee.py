"""Predicted peaks against a ledger of storages that shares no code with what predicts them.

Two steps each: the second must not hold more than the first.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoConfig

from hf_pyao import PyAOConfig, attach
from hf_pyao.levers import NO_LEVERS, Levers
from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.plan.options.auto_plan import plan_of
from hf_pyao.plan.predict.predict import operation_times_ms, predict
from hf_pyao.plan.solve.conditions import Conditions
from hf_pyao.plan.solve.planner import Candidate, Planner
from hf_pyao.plan.solve.steering import MEASURED
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.recorded_step import record_step
from tests.helpers.simulation.late_transport import LateTransport
from tests.helpers.storages import LiveStorages
from tests.plan.predict.test_architectures import SHAPES
from tests.plan.predict.test_random_plans import LAYERS_DIFFER

MICRO_BATCH, LENGTH = 2, 32
MIN_BYTES = 1024
WINDOW = 2**14
CARD = find_hardware("rtx4070").with_link(2.0)

LEVERS: dict[str, tuple[str, Levers]] = {
    "off": ("off", NO_LEVERS),
    "all": ("all", NO_LEVERS),
    "chunked": ("all", Levers(head_loss="chunked")),
    "segments": ("all", Levers(checkpoint_every=1)),
    "nested": ("all", Levers(checkpoint_every=2, checkpoint_nested=True)),
    "attention": ("all", Levers(checkpoint_every=1, save_attention=True)),
    "tiles": ("all", Levers(mlp_tiles=2)),
}
CAPS = (0.05, 0.3, 0.6)
"""Where between the least and the most memory a plan's limit is."""


class Ran(NamedTuple):
    """What the referee saw of a step."""

    peak_bytes: int
    left_bytes: int


def training_of(architecture: str, **more: object) -> FakeTraining:
    config = AutoConfig.for_model(architecture, **{**SHAPES[architecture], **more})
    return FakeTraining(config=config, training_state="device", optimizer_bytes=0)


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def two_steps(training: FakeTraining, settings: PyAOConfig) -> list[Ran]:
    """Run the engine on fake tensors, with copies that are never early, and watch storages."""
    found = []
    with training.model() as (model, fake_mode), without_collector():
        fake_mode.cache_enabled = False  # it would keep storages
        with attach(model, settings, transport=LateTransport()) as offloader:
            ledger = LiveStorages(offloader.host_pool.owns)
            ledger.note([*model.parameters(), *model.buffers()])
            with ledger:
                for _ in range(2):
                    ledger.restart()
                    training.run(model, MICRO_BATCH, LENGTH)
                    model.zero_grad(set_to_none=True)
                    found.append(Ran(ledger.peak_bytes, ledger.live_bytes))
    return found


def storages_alone(program: StepProgram) -> StepProgram:
    """Return a step without what kernels allocate inside, which no storage shows."""
    operations = tuple(each._replace(workspace_bytes=0) for each in program.operations)
    return dataclasses.replace(program, operations=operations)


def settings_of(policy: str, levers: Levers = NO_LEVERS, **more: object) -> PyAOConfig:
    return PyAOConfig.from_dict(
        {
            "policy": policy,
            "window": WINDOW,
            "min_bytes": MIN_BYTES,
            "keep_last_layers": 1,
            "host_memory_gib": 2.0**20,
            "verify_recompute": "off",  # fingerprints are no part of a plan
            **levers.settings(),
            **more,
        }
    )


@pytest.mark.parametrize("architecture", SHAPES)
@pytest.mark.parametrize("name", LEVERS)
@pytest.mark.sampled(every=67)
def test_levers(architecture: str, name: str) -> None:
    policy, levers = LEVERS[name]
    training = training_of(architecture)
    program = storages_alone(record_step(training, MICRO_BATCH, LENGTH, levers=levers))
    first_kept = program.num_layers - levers.kept_layers(program.num_layers, 1)
    leaves = [
        policy == "all" and slot.nbytes >= MIN_BYTES and slot.layer < first_kept
        for slot in program.slots
    ]
    predicted = predict(program, leaves, window_bytes=WINDOW)
    first, second = two_steps(training, settings_of(policy, levers))
    assert first.peak_bytes == predicted.peak_bytes
    assert second.peak_bytes <= first.peak_bytes
    assert second.left_bytes <= first.left_bytes


def planned_bytes(chosen: Candidate) -> int:
    step = chosen.step
    return predict(
        storages_alone(step.program),
        step.leaves,
        window_bytes=chosen.window_bytes,
        rebuilds=step.rebuilds,
    ).peak_bytes


def check_plans(
    training: FakeTraining, shares: tuple[float, ...], path: Path, *, is_exact: bool, **more: Any
) -> None:
    """Run the plans for *shares* of the range of peaks, and compare peaks with the predicted ones.

    Args:
        shares: as :data:`CAPS`.
        path: where the plans are written.
        is_exact: peaks of plans that rebuild are equal to what is predicted, not only below it.
        more: of :class:`Conditions`.
    """
    program = storages_alone(record_step(training, MICRO_BATCH, LENGTH))
    conditions = Conditions(link=CARD.link, window_bytes=WINDOW, min_bytes=MIN_BYTES, **more)
    planner = Planner(program, operation_times_ms(program, CARD.device), conditions)
    least, most = (
        planner.least().peak_bytes,
        max(each.peak_bytes for each in planner.simple().values()),
    )
    for share in shares:
        limit = least + share * (most - least)
        chosen = planner.best(limit)
        plan_of(planner, chosen).to_json_file(path)
        settings = settings_of(
            "plan",
            plan=str(path),
            window=chosen.window_bytes,
            keep_last_layers=chosen.keep_last_layers,
        )
        first, second = two_steps(training, settings)
        assert first.peak_bytes <= planned_bytes(chosen) <= limit
        if is_exact or not chosen.step.rebuilds:
            assert first.peak_bytes == planned_bytes(chosen)
        assert second.peak_bytes <= first.peak_bytes
        assert second.left_bytes <= first.left_bytes


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", SHAPES)
def test_plans_within_caps(architecture: str, tmp_path: Path) -> None:
    is_exact = architecture not in LAYERS_DIFFER
    check_plans(training_of(architecture), CAPS, tmp_path / "plan.json", is_exact=is_exact)


def test_a_plan_within_a_cap(tmp_path: Path) -> None:
    """A short case of the test above: fewer layers, one cap, and speeds that are known."""
    training = training_of("opt", num_hidden_layers=3)
    path = tmp_path / "plan.json"
    check_plans(training, CAPS[:1], path, is_exact=True, speed_ratios=MEASURED)
