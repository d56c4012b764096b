"""In the steady state, nothing that the engine calls stops the host or allocates host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from tests.gpu.device import Device
from tests.gpu.training import batch_of, make_model

pytestmark = pytest.mark.gpu

STEADY = "steady state"
FORBIDDEN = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaHostAlloc",
    "cudaMallocHost",
    "cudaFreeHost",
    "cudaHostRegister",
    "cudaHostUnregister",
)
"""Calls of the CUDA runtime that wait for the device, or allocate pinned memory (which waits)."""


def _calls_in_steady_state(model: nn.Module, device: Device) -> list[str]:
    """Return the names of all calls recorded in the fifth and sixth of six steps."""
    batch = batch_of(device, 64)

    def step() -> None:
        model(**batch).loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    for _ in range(4):
        step()
    device.finish()
    with torch.profiler.profile(activities=device.activities(), acc_events=True) as profile:
        with torch.profiler.record_function(STEADY):
            step()
            step()
    events: list[Any] = list(profile.events())
    (steady,) = [event for event in events if event.name == STEADY and _is_on_host(event)]
    start, end = steady.time_range.start, steady.time_range.end
    # The profiler itself synchronises when it stops: only what began inside the steps counts.
    return [event.name for event in events if start <= event.time_range.start <= end]


def _is_on_host(event: Any) -> bool:
    return event.device_type == torch.autograd.DeviceType.CPU


@pytest.mark.parametrize("window", ["layer", 0, 2**20])
def test_no_call_waits_for_the_device(gpu: Device, window: str | int) -> None:
    model = make_model("llama", gpu)
    plain = _calls_in_steady_state(model, gpu)
    config = PyAOConfig(policy="all", window=window, min_bytes=0)
    with attach(model, config, transport=gpu.transport()) as offloader:
        calls = _calls_in_steady_state(model, gpu)
        assert offloader.metrics()["offloaded_bytes"] > 0
    assert len(calls) > len(plain), "the profiler recorded nothing of the engine's work"
    waits = [name for name in calls if name.startswith(FORBIDDEN)]
    allowed = [name for name in plain if name.startswith(FORBIDDEN)]
    assert sorted(waits) == sorted(allowed)
