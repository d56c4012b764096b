"""Profiles of real steps: what is measured, written and drawn, and that nothing else changes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_pyao import attach
from hf_pyao.engine.runtime.timeline import StepTimeline
from hf_pyao.errors import ConflictError
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.hardware.speeds import DeviceModel, LinkModel
from hf_pyao.plan.measure.profile import MOST_UNCOUNTED, StepProfiler
from tests.helpers import EVERY_LAYER, tiny_batch, tiny_model
from tests.helpers.simulation.device import SimulatedDevice
from tests.helpers.simulation.transport import SimulatedTransport


def step(model: torch.nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model.zero_grad()
    model(**tiny_batch(), use_cache=False).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def profile_of(architecture: str, path: Path, num_steps: int = 2) -> Profile:
    model = tiny_model(architecture)
    expected = step(model)
    config = replace(EVERY_LAYER, profile=path, profile_steps=num_steps)
    with attach(model, config) as offloader:
        for number in range(num_steps + 1):
            assert path.exists() == (number == num_steps)
            assert all(map(torch.equal, step(model), expected))
        assert offloader.engine.observer is None
        assert offloader.profile_writer is not None
        written = offloader.profile_writer.profile
    read = Profile.from_dict(json.loads(path.read_text()))
    assert written is not None
    assert read == written
    return read


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ["opt", "gpt2", "llama"])
def test_what_is_measured(architecture: str, tmp_path: Path) -> None:
    profile = profile_of(architecture, tmp_path / "profile.json")
    model = tiny_model(architecture)
    with attach(model, EVERY_LAYER) as offloader:
        step(model)
        moved, held = (offloader.metrics()[k] for k in ("offloaded_bytes", "would_hold_bytes"))
    num_layers = len(profile.layer_names)
    leaves = sum(slot.nbytes * slot.num_layers for slot in profile.slots if slot.stays is None)
    stays = sum(slot.nbytes * slot.num_layers for slot in profile.slots if slot.stays is not None)
    assert leaves == moved
    assert moved <= held <= leaves + stays
    assert {slot.num_layers for slot in profile.slots if slot.stays is None} == {num_layers}
    per_layer = sum(module.saved_bytes for module in profile.modules)
    assert per_layer * num_layers == leaves
    assert sum(module.packed_bytes for module in profile.modules) >= per_layer
    for module in profile.modules:
        if module.forward is not None:
            spread = module.forward
            assert 0 <= spread.least_ms <= spread.mean_ms <= spread.most_ms
        if module.backward is not None:
            assert profile.layer_backward is not None
            assert module.backward.most_ms <= profile.layer_backward.most_ms
    parts = {module.path for module in profile.modules}
    assert any("mlp" in part or "fc" in part for part in parts)
    assert profile.layer_forward is not None
    assert profile.layer_backward is not None
    assert profile.link["d2h_gib_per_s"]
    assert profile.model["num_layers"] == num_layers


def test_times_are_the_devices() -> None:
    """On a virtual clock a layer takes what its operations cost, and twice is as long as once."""
    model = tiny_model("llama")
    found = []
    for tflop_per_s in (0.01, 0.005):
        transport = SimulatedTransport(0, link=LinkModel(d2h_gib_per_s=9, h2d_gib_per_s=9))
        assert transport.link is not None
        with attach(model, EVERY_LAYER, transport=transport) as offloader:
            done: list[StepProfiler] = []
            profiler = StepProfiler(transport, offloader.device, 1, done.append)
            offloader.engine.observe(profiler)
            speeds = DeviceModel(
                tflop_per_s=tflop_per_s, memory_gib_per_s=500 * tflop_per_s, launch_us=0
            )
            with SimulatedDevice(speeds, transport.link, offloader.host_pool):
                step(model)
            assert done == [profiler]
            found.append(profiler.profile(title="t", model={}, layer_names=["a"], device_name="d"))
    first, second = (
        {module.path: module.forward.mean_ms for module in each.modules if module.forward}
        for each in found
    )
    assert first.keys() == second.keys()
    for path, elapsed_ms in first.items():
        assert second[path] == pytest.approx(2 * elapsed_ms)
    inner = sum(ms for path, ms in first.items() if path.count(".") == 1 and "mlp" in path)
    assert first["mlp"] >= inner > 0


def test_what_page_locks_memory_is_not_measured() -> None:
    model = tiny_model("gpt2")
    pinned = iter([0, 4096, 8192, 8192, 8192])
    with attach(model, EVERY_LAYER) as offloader:
        done: list[StepProfiler] = []
        transport = offloader.engine.link.transport
        profiler = StepProfiler(
            transport, offloader.device, 2, done.append, pinned_bytes=lambda: next(pinned)
        )
        offloader.engine.observe(profiler)
        for number in range(4):
            assert not done, f"it measured {number} micro-batches, two of which pinned memory"
            step(model)
        assert done == [profiler]
    assert profiler.num_uncounted == 2
    calls = profiler.profile(title="t", model={}, layer_names=["a"], device_name="d").modules
    once = {module.path: module.num_packs for module in calls if module.num_packs}
    with attach(model, EVERY_LAYER) as offloader:
        profiler = StepProfiler(offloader.engine.link.transport, offloader.device, 2, done.append)
        offloader.engine.observe(profiler)
        step(model)
        step(model)
    calls = profiler.profile(title="t", model={}, layer_names=["a"], device_name="d").modules
    assert once == {module.path: module.num_packs for module in calls if module.num_packs}


def test_memory_that_keeps_growing_is_measured_in_the_end() -> None:
    model = tiny_model("opt")
    with attach(model, EVERY_LAYER) as offloader:
        done: list[StepProfiler] = []
        transport, grows = offloader.engine.link.transport, itertools.count()
        profiler = StepProfiler(
            transport, offloader.device, 1, done.append, pinned_bytes=lambda: next(grows)
        )
        offloader.engine.observe(profiler)
        for _ in range(MOST_UNCOUNTED + 1):
            assert not done
            step(model)
        assert done == [profiler]


@pytest.mark.thorough
def test_a_file_that_cannot_be_written_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    folder = tmp_path / "later"
    config = replace(EVERY_LAYER, profile=folder / "profile.json", profile_steps=1)
    with attach(model, config):
        folder.write_text("a file where a folder should be")
        step(model)
        step(model)
    assert "the profile is lost" in caplog.text


@pytest.mark.thorough
def test_the_profile_is_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the script goes elsewhere before it is written."""
    model = tiny_model("llama")
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with attach(model, replace(EVERY_LAYER, profile="profile.json", profile_steps=1)):
        monkeypatch.chdir(elsewhere)
        step(model)
    assert (tmp_path / "profile.json").is_file()
    assert not list(elsewhere.iterdir())


def test_what_a_profile_cannot_be_made_of_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    expected = step(model)

    def fail(self: object, **_: object) -> None:
        raise RuntimeError("the clock has stopped")

    monkeypatch.setattr(StepProfiler, "profile", fail)
    path = tmp_path / "profile.json"
    with attach(model, replace(EVERY_LAYER, profile=path, profile_steps=1)) as offloader:
        for _ in range(2):
            assert all(map(torch.equal, step(model), expected))
        assert offloader.engine.observer is None
    assert "the clock has stopped" in caplog.text
    assert not path.exists()


def test_a_run_that_was_too_short_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    path = tmp_path / "profile.json"
    with attach(model, replace(EVERY_LAYER, profile=path, profile_steps=2)) as offloader:
        step(model)
    offloader.detach()
    assert caplog.text.count("no profile is written: it is of 2 micro-batches") == 1
    assert not path.exists()


@pytest.mark.thorough
def test_one_profile_after_another(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with attach(model, EVERY_LAYER) as offloader:
        for name in ("first.json", "second.json"):
            offloader.start_profile(tmp_path / name, 1)
            with pytest.raises(ConflictError, match="being made already"):
                offloader.start_profile(tmp_path / name, 1)
            for _ in range(2):
                step(model)
            assert Profile.from_dict(json.loads((tmp_path / name).read_text())).program is not None


@pytest.mark.thorough
def test_with_the_papers_rule_and_a_timeline_beside_it(tmp_path: Path) -> None:
    model = tiny_model("llama")
    expected = step(model)
    config = replace(EVERY_LAYER, policy="pyao", profile=tmp_path / "profile.json", profile_steps=2)
    with attach(model, config) as offloader:
        timeline = StepTimeline(offloader.transport, offloader.device)
        offloader.engine.observe_too(timeline)
        for _ in range(3):
            assert all(map(torch.equal, step(model), expected))
        assert offloader.pyao_rule is not None
        assert offloader.pyao_rule.plan is not None
        assert (tmp_path / "profile.json").exists()
        assert offloader.engine.observer is timeline
        offloader.engine.observe(None)  # for others alone
        assert offloader.engine.observer is timeline
        assert timeline.spans()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_hosts_time_is_noted_where_the_host_is_not_the_device(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("gpt2", n_layer=2)
    transport = SimulatedTransport(3, link=LinkModel(d2h_gib_per_s=9.0, h2d_gib_per_s=9.0))
    with attach(model, EVERY_LAYER, transport=transport) as offloader:
        profiler = StepProfiler(transport, offloader.device, 2, lambda _: None)
        offloader.engine.observe(profiler)
        step(model)
        step(model)
    monkeypatch.setattr(profiler, "_device", torch.device(device))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    profile = profiler.profile(title="t", model={}, layer_names=["a"], device_name="d")
    if device == "cpu":
        assert "layer_forward_ms" not in profile.host
    else:
        assert 0 < profile.host["layer_forward_ms"] < 1e4
