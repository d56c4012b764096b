"""The replayed allocator beside the device's own: what the same requests make both reserve."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from hf_pyao.plan.hardware.caching_allocator import Block, CachingAllocator
from hf_pyao.plan.hardware.device_limit import allocator_settings
from tests.gpu.device import Device
from tests.gpu.training import batch_of, make_model

pytestmark = pytest.mark.gpu

NUM_STEPS = 3


def requests_of(run: Any, device: torch.device) -> list[dict[str, Any]]:
    """Return what *run* allocates and frees, in order, as torch records it."""
    torch.cuda.memory._record_memory_history(max_entries=10**6, context=None)
    try:
        run()
        torch.cuda.synchronize(device)
        traces = torch.cuda.memory._snapshot(device)["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    found: list[dict[str, Any]] = traces[device.index or 0]
    return [each for each in found if each["action"] in ("alloc", "free_completed")]


def test_the_same_requests_reserve_the_same(gpu: Device) -> None:
    device = gpu.torch_device
    if device.type != "cuda":
        pytest.skip("torch records the requests of CUDA's allocator alone")
    settings = allocator_settings(device)
    if settings is None:
        pytest.skip("the allocator is not torch's own")
    gc.collect()
    torch.cuda.init()  # statistics of a device that nobody has used yet cannot be reset
    torch._C._cuda_clearCublasWorkspaces()  # those of earlier tests: this one's are recorded
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_reserved(device)
    if before_bytes:
        pytest.skip(f"other tests still hold {before_bytes} bytes: run this file alone")
    torch.cuda.reset_peak_memory_stats(device)

    def train() -> None:
        model = make_model("llama", gpu, torch.bfloat16)
        for _ in range(NUM_STEPS):
            model(**batch_of(gpu, 256, size=16)).loss.backward()
            model.zero_grad()

    replayed, blocks = CachingAllocator(settings), {}
    for each in requests_of(train, device):
        key: tuple[int, int] = (each["addr"], each["stream"])
        if each["action"] == "alloc":
            blocks[key] = replayed.allocate(each["size"], each["stream"])
        else:
            block: Block = blocks.pop(key)
            replayed.free(block)
    assert replayed.peak_allocated_bytes == torch.cuda.max_memory_allocated(device)
    assert replayed.peak_reserved_bytes == torch.cuda.max_memory_reserved(device)
