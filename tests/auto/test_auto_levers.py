"""Policy auto sets segments and tiles: between forwards, bit for bit, and only where it may."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.offloader import Offloader
from hf_pyao.auto.recording import lever_recording
from hf_pyao.auto.recording.lever_recording import room_for
from hf_pyao.config import GIB
from hf_pyao.engine.recompute.segment_lifecycle import SegmentLifecycle
from hf_pyao.errors import RecomputationError
from hf_pyao.levers import Levers
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.documents.plan_facts import PlanError
from hf_pyao.plan.options.lever_choice import LeverChoice
from hf_pyao.plan.options.plan_request import PlanRequest
from tests.auto.test_auto_policy import (
    NUM_MEASURED,
    assert_same,
    batch_of,
    run_out,
    step,
    transport,
    warnings_in,
)
from tests.helpers import enable_checkpointing, tiny_batch, tiny_model

GIVEN: dict[str, Any] = {
    "policy": "auto",
    "profile_steps": NUM_MEASURED,
    "min_bytes": 256,
    "window": 8192,
}

LARGE = batch_of(32)
"""With smaller ones memory peaks outside of the layers."""


def config_of(**more: Any) -> PyAOConfig:
    """Return a configuration that leaves segments open."""
    return PyAOConfig(**{**GIVEN, **more})


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Have the choice fall on what is put in here, if anything is, whatever it costs."""
    found: dict[str, Any] = {}
    best = LeverChoice.best

    def chosen(choice: LeverChoice, limit_bytes: float) -> Any:
        result = best(choice, limit_bytes)
        if not found or result.levers.checkpoint_every:
            return result
        levers = replace(choice.levers, **found)
        planner = choice.planner_for(levers)
        return replace(
            result, levers=levers, planner=planner, candidate=planner.least(), reason="wanted"
        )

    monkeypatch.setattr(LeverChoice, "best", chosen)
    return found


def levers_of(offloader: Offloader) -> Levers:
    return offloader._deciding.switch.levers


def lifecycle_of(offloader: Offloader) -> SegmentLifecycle:
    lifecycle = offloader._lifecycle
    assert isinstance(lifecycle, SegmentLifecycle)
    return lifecycle


def least_limits(architecture: str) -> tuple[int, int]:
    """Return the lowest peaks: of plans slot by slot, and where each layer runs again."""
    model = tiny_model(architecture).train()
    with attach(model, config_of(device_memory_gib=1e-6), transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 1):
            step(model, LARGE, offloader)
        choice = offloader.auto.draft.choice.resident  # type: ignore[union-attr]
        segments = choice.planner_for(Levers(checkpoint_every=1))
        return choice.configured.least().peak_bytes, segments.least().peak_bytes


@pytest.mark.thorough
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_segments_come_between_two_forwards_and_nothing_changes(
    architecture: str, every: int, wanted: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """With dropout, bit for bit; also as they go again."""
    wanted.update(checkpoint_every=every)
    model = tiny_model(architecture, dropout=0.1).train()
    expected = step(model)
    with attach(model, config_of(device_memory_gib=1e-5), transport=transport()) as offloader:
        for _ in range(NUM_MEASURED):
            assert_same(step(model, None, offloader), expected)
            assert levers_of(offloader) == Levers()
        for _ in range(2):
            assert_same(step(model, None, offloader), expected)
        assert levers_of(offloader).checkpoint_every == every
        lifecycle = lifecycle_of(offloader)
        assert lifecycle.filled.num_runs > 0
        plan = offloader.plan
        assert plan is not None and plan.levers["checkpoint_every"] == every
        assert {slot.name for slot in plan.slots} == {":0"}
        assert "computed again" in offloader.describe()
        num_runs = lifecycle.filled.num_runs
        offloader._deciding.switch.set(Levers())
        assert_same(step(model, None, offloader), expected)
        assert lifecycle.filled.num_runs == num_runs
    assert_same(step(model), expected)


@pytest.mark.thorough
def test_a_forward_that_waits_goes_back_as_it_began() -> None:
    """Segments are switched, and tiles, between a forward and its backward."""
    model = tiny_model("llama").train()
    batch = batch_of(64)
    settings = config_of(policy="all", mlp_tiles=4, checkpoint_every=1)
    expected = []
    for first, second in ((4, 4), (4, 8), (8, 4)):
        model.zero_grad()
        with attach(model, settings) as offloader:
            switch = offloader._deciding.switch
            losses = []
            for tiles in (first, second):
                switch.set(Levers(mlp_tiles=tiles, checkpoint_every=1 if tiles == 4 else 2))
                losses.append(model(**batch, use_cache=False).loss)
            for loss in losses:
                loss.backward()
        expected.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    alike, *others = expected
    for found in others:
        for a, b in zip(found, alike, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)  # tiles change the order of sums


@pytest.mark.thorough
def test_a_cap_below_the_least_of_slot_by_slot_plans_is_met_by_segments() -> None:
    plain, segments = least_limits("llama")
    assert segments < plain
    model = tiny_model("llama").train()
    expected = step(model, LARGE)
    config = config_of(device_memory_gib=(segments + 0.5) / GIB)
    with attach(model, config, transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 2):
            assert_same(step(model, LARGE, offloader), expected)
        plan = offloader.plan
        assert plan is not None
        assert plan.levers["checkpoint_every"] == 1
        assert plan.facts.peak_bytes <= segments + 1
        assert "the fastest that fits" in plan.levers_reason
        assert {setting.is_chosen for setting in plan.lever_settings} == {True, False}


def test_what_was_given_stays(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama").train()
    config = config_of(device_memory_gib=1e-6, checkpoint_every=0)
    with attach(model, config, transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 1):
            step(model, None, offloader)
        plan = offloader.plan
        assert plan is not None
        assert plan.levers["checkpoint_every"] == 0 and not plan.lever_settings
        assert plan.levers_reason.endswith("checkpoint_every is 0")
        assert not isinstance(offloader._lifecycle, SegmentLifecycle)


@pytest.mark.thorough
def test_others_checkpointing_leaves_no_room_and_takes_it_back(
    wanted: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama").train()
    room = room_for(PlanRequest.of_config(config_of()).room, model)
    assert room.segments
    wanted.update(checkpoint_every=1)
    with attach(model, config_of(device_memory_gib=1e-5), transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 1):
            step(model, None, offloader)
        assert lifecycle_of(offloader).length == 1
        expected = step(model, None, offloader)
        enable_checkpointing(model, use_reentrant=False)
        assert not room_for(PlanRequest.of_config(config_of()).room, model).segments
        assert (
            "checkpointed already"
            in room_for(PlanRequest.of_config(config_of()).room, model).why_no_segments
        )
        assert_same(step(model, None, offloader), expected)
        assert lifecycle_of(offloader).length == 0
    assert any("checkpointed already" in line for line in warnings_in(caplog))


def test_layers_that_no_one_checkpoints_do_not_run_again_by_themselves() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    layers = ("0", "1", "2")
    room = room_for(PlanRequest.of_config(PyAOConfig(layers=layers)).room, model, layers)
    assert not room.segments
    assert "not known to be made for checkpointing" in room.why_no_segments


@pytest.mark.thorough
def test_a_hook_of_a_user_is_not_called_twice_without_being_asked() -> None:
    model = tiny_model("llama").train()
    assert room_for(PlanRequest.of_config(config_of()).room, model).segments
    handle = model.get_decoder().layers[1].mlp.register_forward_hook(lambda *_: None)
    assert (
        "would be called twice"
        in room_for(PlanRequest.of_config(config_of()).room, model).why_no_segments
    )
    with attach(model, config_of(device_memory_gib=1e-5), transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 1):
            step(model, None, offloader)
        assert lifecycle_of(offloader).length == 0
        handle.remove()
        assert room_for(
            PlanRequest.of_config(config_of()).room, model
        ).segments  # hooks of ours are none of a user's


def hook_on_an_mlp(model: nn.Module) -> list[int]:
    """Put a hook of a user's into a layer; return what gets an entry at each call."""
    calls: list[int] = []
    layer = model.get_decoder().layers[1]  # type: ignore[operator]
    layer.mlp.register_forward_hook(lambda *_: calls.append(1))
    return calls


NUM_ACTIVATIONS = [0]
"""State of the world, which no inventory of a model knows."""


class GoesByTheWorld(nn.Module):
    """An activation that depends on how often it ran since the step began."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        NUM_ACTIVATIONS[0] += 1
        return nn.functional.silu(hidden) * (1 + max(0, NUM_ACTIVATIONS[0]))


@pytest.mark.thorough
def test_auto_plans_without_segments_where_a_second_run_goes_wrong(
    wanted: dict[str, Any],
) -> None:
    """It chose them by itself: the micro-batch is lost, and the next ones run each layer once."""
    wanted.update(checkpoint_every=1)
    model = tiny_model("llama").train()
    model.get_decoder().layers[1].mlp.act_fn = GoesByTheWorld()

    def counted_step(offloader: Offloader | None, start: int = 0) -> list[torch.Tensor]:
        NUM_ACTIVATIONS[0] = start  # far below zero, runs are alike
        return step(model, None, offloader)

    expected = counted_step(None)
    with attach(model, config_of(device_memory_gib=1e-5), transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 1):
            counted_step(offloader, start=-100)
        assert lifecycle_of(offloader).length == 1
        wanted.clear()
        with pytest.raises(
            RecomputationError, match="from the next forward on no layer runs again"
        ):
            offloader.run_micro_batch(lambda: counted_step(offloader))
        for _ in range(2):
            model.zero_grad()
            found = offloader.run_micro_batch(lambda: counted_step(offloader))
            assert_same(found, expected)
        assert lifecycle_of(offloader).length == 0
        plan = offloader.plan
        assert plan is not None and not plan.levers.get("checkpoint_every")


@pytest.mark.thorough
def test_auto_plans_without_segments_in_a_hand_loop_whose_second_run_failed(
    wanted: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    wanted.update(checkpoint_every=1)
    model = tiny_model("llama").train()
    expected = step(model)
    with attach(model, config_of(device_memory_gib=1e-5), transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 1):
            assert_same(step(model, None, offloader), expected)
        assert lifecycle_of(offloader).length == 1
        wanted.clear()
        own = nn.functional.silu
        with mock.patch.object(nn.functional, "silu") as silu:
            model.zero_grad()
            silu.side_effect = own
            loss = model(**tiny_batch(), use_cache=False).loss
            silu.side_effect = OSError("the disk is full")
            with pytest.raises(OSError, match="disk"):
                loss.backward()
        for _ in range(3):
            model.zero_grad()
            assert_same(step(model, None, offloader), expected)
            assert lifecycle_of(offloader).length == 0
        plan = offloader.plan
        assert plan is not None and not plan.levers.get("checkpoint_every")
    lines = warnings_in(caplog)
    assert sum("could not run again" in line for line in lines) == 1


@pytest.mark.thorough
def test_a_hook_that_comes_while_layers_run_again_is_called_once(
    wanted: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    wanted.update(checkpoint_every=2)
    model = tiny_model("llama", dropout=0.1).train()
    expected = step(model)
    with attach(model, config_of(device_memory_gib=1e-5), transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 1):
            assert_same(step(model, None, offloader), expected)
        assert lifecycle_of(offloader).length == 2
        wanted.clear()
        calls = hook_on_an_mlp(model)
        for number in range(1, 4):
            assert_same(step(model, None, offloader), expected)
            assert len(calls) == number
        assert lifecycle_of(offloader).length == 0
        plan = offloader.plan
        assert plan is not None and plan.levers["checkpoint_every"] == 0
        assert any(slot.action != "keep" for slot in plan.slots)
        assert sum("would be called twice" in line for line in warnings_in(caplog)) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("comes_from", ["a checkpoint", "the file that is kept"])
@pytest.mark.sampled(every=1)
def test_a_plan_of_before_is_not_followed_where_a_hook_would_be_called_twice(
    comes_from: str, tmp_path: Path, wanted: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    is_kept = comes_from != "a checkpoint"
    wanted.update(checkpoint_every=2)
    model = tiny_model("llama", dropout=0.1).train()
    expected = step(model)
    path = tmp_path / "plan.json"
    config = config_of(device_memory_gib=1e-5, plan=str(path) if is_kept else None)
    with attach(model, config, transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 1):
            step(model, None, offloader)
        if not is_kept:
            assert offloader.auto is not None
            offloader.auto.save(path)
    assert json.loads(path.read_text())["levers"]["checkpoint_every"] == 2
    wanted.clear()
    calls = hook_on_an_mlp(model)
    with attach(model, config, transport=transport()) as offloader:
        assert offloader.auto is not None
        if not is_kept:
            offloader.auto.resume(path)
        for number in range(1, NUM_MEASURED + 3):
            assert_same(step(model, None, offloader), expected)
            assert len(calls) == number
        plan = offloader.plan
        assert plan is not None and plan.levers["checkpoint_every"] == 0
        assert lifecycle_of(offloader).length == 0
    assert sum("would be called twice" in line for line in warnings_in(caplog)) == 1


@pytest.mark.thorough
def test_layers_that_refuse_are_trained_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = lever_recording.record_fake_step

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if kwargs["levers"].checkpoint_every:
            raise ValueError("this layer counts its calls")
        return record(*args, **kwargs)

    monkeypatch.setattr(lever_recording, "record_fake_step", refuse)
    model = tiny_model("llama").train()
    expected = step(model)
    with attach(model, config_of(device_memory_gib=1e-6), transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 1):
            assert_same(step(model, None, offloader), expected)
        plan = offloader.plan
        assert plan is not None and plan.levers["checkpoint_every"] == 0
        notes = {setting.note for setting in plan.lever_settings if setting.step_ms is None}
        assert notes and all("counts its calls" in note for note in notes)


@pytest.mark.thorough
def test_running_out_of_memory_may_bring_segments() -> None:
    plain, _ = least_limits("llama")
    model = tiny_model("llama").train()
    expected = step(model, LARGE)
    config = config_of(device_memory_gib=(plain + 1) / GIB)
    with attach(model, config, transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 1):
            step(model, LARGE, offloader)
        assert levers_of(offloader).checkpoint_every == 0
        peaks, told = [], []
        while offloader.plan is not None:
            peaks.append(offloader.plan.facts.peak_bytes)
            assert len(peaks) < 20
            told.append(str(run_out(offloader)))
            assert_same(step(model, LARGE, offloader), expected)
        assert "run again" in told[-2]
        assert levers_of(offloader).checkpoint_every
        assert peaks == sorted(peaks, reverse=True) and peaks[-1] < plain
        assert "compute waits for every copy" in told[-1]  # what runs again recomputes already
        assert run_out(offloader) is None


@pytest.mark.thorough
def test_a_kept_plan_sets_its_levers_and_is_made_anew_where_it_may_not(
    tmp_path: Path, wanted: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "plan.json"
    wanted.update(checkpoint_every=2)
    model = tiny_model("llama").train()
    expected = step(model)
    config = config_of(device_memory_gib=1e-5, plan=str(path))
    with attach(model, config, transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 1):
            step(model, None, offloader)
    assert json.loads(path.read_text())["levers"]["checkpoint_every"] == 2
    with attach(model, config, transport=transport()) as offloader:
        assert offloader.profile_writer is None
        assert lifecycle_of(offloader).length == 2
        assert_same(step(model, None, offloader), expected)
        assert lifecycle_of(offloader).filled.num_runs > 0
    # As a plan of its own, and where something else was given.
    followed = PyAOConfig(policy="plan", plan=str(path), min_bytes=256, window=8192)
    with attach(model, followed, transport=transport()) as offloader:
        assert offloader.config == followed
        assert lifecycle_of(offloader).length == 2
        assert_same(step(model, None, offloader), expected)
        assert attach(model, followed) is offloader
    with pytest.raises(PlanError, match="Give checkpoint_every=2"):
        attach(model, PyAOConfig(policy="plan", plan=str(path), checkpoint_every=0))
    wanted.clear()
    caplog.clear()
    given = config_of(device_memory_gib=1e-5, plan=str(path), checkpoint_every=0)
    with attach(model, given, transport=transport()) as offloader:
        assert offloader.plan is None
        for _ in range(NUM_MEASURED + 1):
            assert_same(step(model, None, offloader), expected)
        assert offloader.plan is not None
    assert sum("is made anew" in line for line in warnings_in(caplog)) == 1
    assert json.loads(path.read_text())["levers"]["checkpoint_every"] == 0


@pytest.mark.thorough
def test_a_plan_in_a_checkpoint_is_followed_with_its_levers(
    tmp_path: Path, wanted: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    wanted.update(checkpoint_every=1)
    model = tiny_model("llama").train()
    config = config_of(device_memory_gib=1e-5)
    with attach(model, config, transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 1):
            step(model, None, offloader)
        assert offloader.auto is not None
        offloader.auto.save(tmp_path / "plan.json")
    expected = step(model)
    with attach(model, config, transport=transport()) as offloader:
        assert offloader.auto is not None
        offloader.auto.resume(tmp_path / "plan.json")
        assert lifecycle_of(offloader).length == 1
        assert_same(step(model, None, offloader), expected)
    caplog.clear()
    given = config_of(device_memory_gib=1e-5, checkpoint_every=0)
    with attach(model, given, transport=transport()) as offloader:
        assert offloader.auto is not None
        offloader.auto.resume(tmp_path / "plan.json")
        assert offloader.plan is None and offloader.auto.measures
    assert sum("in the checkpoint is not followed" in line for line in warnings_in(caplog)) == 1


@pytest.mark.thorough
def test_tiles_are_changed_only_where_they_were_allowed(wanted: dict[str, Any]) -> None:
    """The number of tiles is that of the plan; without permission a plan with tiles is refused."""
    wanted.update(mlp_tiles=4)
    batch = batch_of(64)
    model = tiny_model("llama").train()
    with attach(model, PyAOConfig(policy="off", mlp_tiles=4)):
        expected = step(model, batch)
    config = config_of(device_memory_gib=1e-5, mlp_tiles="auto", checkpoint_every=0)
    with attach(model, config, transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 1):
            step(model, batch, offloader)
        assert offloader.mlp_tiles is not None and offloader.mlp_tiles.tiles == 4
        assert_same(step(model, batch, offloader), expected)
        assert offloader.mlp_tiles.last_plan is not None
        assert offloader.mlp_tiles.last_plan.num_tiles == 4
        plan = offloader.plan
    assert plan is not None
    assert not [name for name in vars(model) if name.startswith("_pyao_")]
    for module in model.modules():
        assert not [name for name in vars(module) if name.startswith("_pyao_")]
    with attach(model, config_of(device_memory_gib=1.0, checkpoint_every=0)) as offloader:
        assert offloader.auto is not None
        with pytest.raises(PlanError, match="does not switch tiles on"):
            offloader.auto.follow(Plan.from_dict(plan.to_dict()), "a plan")
