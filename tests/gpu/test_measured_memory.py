"""What no prediction knows is measured, and later plans leave room for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.machine.states import Mode
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.documents.schema import read_json
from hf_pyao.plan.measure import segment_memory
from hf_pyao.plan.measure.profile import MOST_UNCOUNTED
from hf_pyao.plan.measure.segment_memory import predicted_growth
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.step.recorded_step import RecordedStep
from tests.gpu.device import Device
from tests.gpu.training import batch_of, make_model

pytestmark = pytest.mark.gpu

GIB = 2**30
UNKNOWN_BYTES = 48 << 20


@contextmanager
def holding_unknown_memory(model: Any) -> Iterator[None]:
    """Have the second layer hold a buffer from its forward to the next step's."""
    held: dict[str, torch.Tensor] = {}

    def hold(module: nn.Module, args: Any, output: Any) -> None:
        device = next(module.parameters()).device
        held["buffer"] = torch.empty(UNKNOWN_BYTES, dtype=torch.uint8, device=device)

    handles = [
        model.model.layers[1].register_forward_hook(hold),
        model.register_forward_pre_hook(lambda *_: held.clear()),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def step_peak_bytes(model: Any, batch: dict[str, torch.Tensor], device: torch.device) -> int:
    torch.accelerator.reset_peak_memory_stats(device)
    model(**batch).loss.backward()
    model.zero_grad()
    torch.accelerator.synchronize(device)
    return torch.accelerator.max_memory_allocated(device)


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_plan_leaves_room_for_what_is_measured(
    is_measured: bool, gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = gpu.torch_device
    if segment_memory.allocated_and_peak_bytes(device) is None:
        pytest.skip("the device does not count its memory")
    model: Any = make_model("llama", gpu)
    batch = batch_of(gpu, 256, size=16)
    step_peak_bytes(model, batch, device)  # libraries' workspaces
    gc.collect()
    there_bytes = torch.accelerator.memory_allocated(device)
    most_bytes = step_peak_bytes(model, batch, device)
    limit_bytes = there_bytes + (most_bytes - there_bytes) * 4 // 5
    if not is_measured:
        monkeypatch.setattr(segment_memory, "allocated_and_peak_bytes", lambda device: None)
    config = PyAOConfig(policy="auto", profile_steps=2, device_memory_gib=limit_bytes / GIB)
    with holding_unknown_memory(model), attach(model, config, device=device) as offloader:
        assert offloader.auto is not None
        for _ in range(12):
            peak_bytes = step_peak_bytes(model, batch, device)
            if offloader.auto.driver.state.mode is Mode.FOLLOWING:
                break
        peak_bytes = step_peak_bytes(model, batch, device)
        said = offloader.describe()
    # On CUDA so small a model may as well run again whole, which leaves room by itself.
    assert is_measured or device.type == "cuda" or peak_bytes > limit_bytes, said
    assert not is_measured or peak_bytes <= limit_bytes, said
    assert ("more than predicted, which is left free" in said) == is_measured


@pytest.mark.parametrize("architecture", ["opt", "gpt2"])
def test_without_it_what_is_measured_was_predicted(
    architecture: str, gpu: Device, tmp_path: Path
) -> None:
    device = gpu.torch_device
    if segment_memory.allocated_and_peak_bytes(device) is None:
        pytest.skip("the device does not count its memory")
    model, batch = make_model(architecture, gpu), batch_of(gpu, 256, size=16)
    step_peak_bytes(model, batch, device)  # libraries' workspaces
    path = tmp_path / "profile.json"
    config = PyAOConfig(policy="all", profile=path, profile_steps=1)
    torch.accelerator.reset_peak_memory_stats(device)
    with attach(model, config, device=device):
        for _ in range(MOST_UNCOUNTED + 2):
            model(**batch).loss.backward()
            model.zero_grad()
    profile = Profile.from_dict(read_json(path))
    assert profile.program is not None
    program = RecordedStep.from_dict(profile.program).whole()
    leaves = [slot.stays is None for slot in program.slots]
    predicted = predicted_growth(program, predict(program, leaves, window_bytes=256 << 20))
    grown = dict(profile.grown_bytes)
    assert grown.pop("before") >= 0
    assert {"before", *grown} == predicted.keys() == {"before", "forward", "head", "backward"}
    for segment, grown_bytes in grown.items():
        # Copies are never early in this prediction; in truth all of three layers may have left.
        kept = predict(program, [False] * len(leaves), window_bytes=None)
        # A stand-in for CUDA runs other operations than those that were recorded.
        assert grown_bytes <= 1.25 * predicted[segment], segment
        assert grown_bytes >= 0.2 * predicted_growth(program, kept)[segment], segment
