"""What of a device may be reserved, and by which allocator's settings."""

from __future__ import annotations

import pytest
import torch

from hf_pyao.plan.hardware import device_limit
from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.hardware.device_limit import allocator_settings, release_cached

XPU = torch.device("xpu", 0)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "PYTORCH_ALLOC_CONF",
            "expandable_segments:True",
            AllocatorSettings(expandable_segments=True),
        ),
        (
            "PYTORCH_CUDA_ALLOC_CONF",
            "max_split_size_mb:64",
            AllocatorSettings(max_split_bytes=2**26),
        ),
        ("PYTORCH_CUDA_ALLOC_CONF", "nothing that is known", AllocatorSettings()),
    ],
)
@pytest.mark.sampled(every=1)
def test_settings_are_those_of_the_process(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, expected: AllocatorSettings
) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", str, raising=False)
    for variable in device_limit.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert allocator_settings(XPU) == AllocatorSettings()
    monkeypatch.setenv(name, text)
    assert allocator_settings(XPU) == expected
    told = "expandable_segments:True"
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: told, raising=False)
    assert allocator_settings(XPU) == AllocatorSettings(expandable_segments=True)


def test_other_allocators_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert allocator_settings(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert allocator_settings(torch.device("cuda", 0)) is None
    release_cached(torch.device("cpu"))  # has nothing to give back
