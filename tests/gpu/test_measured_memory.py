"""What no prediction knows is measured, and later plans leave room for it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.machine.states import Mode
from hf_pyao.auto.plans.draft import Draft
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.documents.schema import read_json
from hf_pyao.plan.hardware import device_limit
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


class MakesState(torch.optim.SGD):
    """An optimizer that makes a large state in its first step, as AdamW does."""

    state_made: torch.Tensor | None = None

    def step(self, closure: Any = None) -> None:
        if self.state_made is None:
            device = self.param_groups[0]["params"][0].device
            self.state_made = torch.empty(UNKNOWN_BYTES, dtype=torch.uint8, device=device)
        super().step()


def step_peak_bytes(model: Any, batch: dict[str, torch.Tensor], device: torch.device) -> int:
    torch.accelerator.reset_peak_memory_stats(device)
    model(**batch).loss.backward()
    model.zero_grad()
    torch.accelerator.synchronize(device)
    return torch.accelerator.max_memory_allocated(device)


def planned_peak_bytes(
    model: Any, batch: dict[str, torch.Tensor], offloader: Any, after_step: Callable[[], object]
) -> int:
    """Train until a plan is checked and followed; return the peak of the step behind."""
    device = offloader.device
    for _ in range(12):
        step_peak_bytes(model, batch, device)
        after_step()
        if offloader.auto.driver.state.mode is Mode.FOLLOWING:
            break
    return step_peak_bytes(model, batch, device)


def limit_below_all(model: Any, batch: dict[str, torch.Tensor], device: torch.device) -> int:
    """Return a limit, in bytes, under which a fifth of what a step takes has to go."""
    step_peak_bytes(model, batch, device)  # libraries' workspaces
    gc.collect()
    there_bytes = torch.accelerator.memory_allocated(device)
    most_bytes = step_peak_bytes(model, batch, device)
    return there_bytes + (most_bytes - there_bytes) * 4 // 5


@pytest.mark.parametrize("who", ["layer", "optimizer"])
@pytest.mark.parametrize("is_measured", [True, False])
def test_a_plan_leaves_room_for_what_is_measured(
    is_measured: bool, who: str, gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = gpu.torch_device
    if segment_memory.allocated_and_peak_bytes(device) is None:
        pytest.skip("the device does not count its memory")
    # A slow host would have layers run again as a whole, which leaves room by itself.
    monkeypatch.setattr(Draft, "checkpointed", lambda draft: None)
    model: Any = make_model("llama", gpu)
    batch = batch_of(gpu, 256, size=16)
    limit_bytes = limit_below_all(model, batch, device)
    if not is_measured:
        monkeypatch.setattr(segment_memory, "allocated_and_peak_bytes", lambda device: None)
        monkeypatch.setattr(device_limit, "_allocated_bytes", lambda device: 0)
    config = PyAOConfig(policy="auto", profile_steps=2, device_memory_gib=limit_bytes / GIB)
    is_layer = who == "layer"
    holding = holding_unknown_memory(model) if is_layer else contextlib.nullcontext()
    after_step = int if is_layer else MakesState(model.parameters(), lr=1e-3).step
    with holding, attach(model, config, device=device) as offloader:
        peak_bytes = planned_peak_bytes(model, batch, offloader, after_step)
        said = offloader.describe()
    # On CUDA so small a model may as well run again whole, which leaves room by itself.
    assert is_measured or device.type == "cuda" or peak_bytes > limit_bytes, said
    assert not is_measured or peak_bytes <= limit_bytes, said
    assert not is_layer or ("more than predicted, which is left free" in said) == is_measured


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_plan_leaves_alone_what_another_process_holds(
    is_measured: bool, gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = gpu.torch_device
    module = getattr(torch, device.type)
    if not hasattr(module, "mem_get_info"):
        pytest.skip("the device does not say what is free")
    model: Any = make_model("llama", gpu)
    batch = batch_of(gpu, 256, size=16)
    limit_bytes = limit_below_all(model, batch, device)
    all_bytes = module.mem_get_info(device)[1]

    def free_bytes(device: torch.device) -> tuple[int, int]:
        """Another process takes its memory while the first micro-batch is measured."""
        is_there = is_attached and is_measured
        left_bytes = limit_bytes + (0 if is_there else GIB)
        return left_bytes - torch.accelerator.memory_reserved(device), all_bytes

    monkeypatch.setattr(module, "mem_get_info", free_bytes)
    is_attached = False
    with attach(model, PyAOConfig(policy="auto", profile_steps=2), device=device) as offloader:
        is_attached = True
        peak_bytes = planned_peak_bytes(model, batch, offloader, after_step=int)
        said = offloader.describe()
    assert (peak_bytes <= limit_bytes) == is_measured, said


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
