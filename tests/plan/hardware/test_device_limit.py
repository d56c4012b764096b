"""What of a device may be reserved, and by which allocator's settings."""

from __future__ import annotations

import pytest
import torch

from hf_pyao.model.losses.chunking import default_budget_bytes
from hf_pyao.plan.hardware import device_limit, device_speeds
from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.hardware.device_limit import allocator_settings, gradient_bytes, release_cached
from hf_pyao.plan.hardware.device_speed import DeviceSpeed
from hf_pyao.plan.hardware.device_speeds import hardware_of
from hf_pyao.plan.hardware.link_speed import LinkSpeed
from hf_pyao.plan.hardware.presets import HARDWARE
from hf_pyao.plan.hardware.speeds import GIB
from tests.helpers.hardware import pretend_card

XPU = torch.device("xpu", 0)
CUDA = torch.device("cuda", 0)


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


@pytest.mark.parametrize(
    ("free_gib", "fraction", "limit_gib"),
    [(40, 1.0, 0.99 * 41), (40, 0.25, 20), (9, 0.25, 0.99 * 10)],
)
@pytest.mark.sampled(every=1)
def test_a_memory_fraction_is_a_limit(
    monkeypatch: pytest.MonkeyPatch, free_gib: float, fraction: float, limit_gib: float
) -> None:
    pretend_card(monkeypatch, total_gib=80, free_gib=free_gib, fraction=fraction)
    limit = device_limit.device_limit(CUDA, None)
    assert limit is not None
    assert limit.nbytes == pytest.approx(limit_gib * GIB, abs=1)
    assert ("fraction" in limit.how) == (limit_gib == 20)
    given = device_limit.device_limit(CUDA, 60.0)
    assert given is not None and given.nbytes == 60 * GIB
    assert default_budget_bytes(CUDA) == min(2 * GIB, int(fraction * 80 * GIB) // 24)


@pytest.mark.parametrize(("fraction", "memory_gib"), [(1.0, 80), (0.5, 39.6 + 1.2)])
def test_a_preset_has_the_memory_that_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch, fraction: float, memory_gib: float
) -> None:
    name = "NVIDIA H100 80GB HBM3"
    pretend_card(monkeypatch, name=name, total_gib=79.2, fraction=fraction)
    found = hardware_of(CUDA)
    assert found.memory_gib == pytest.approx(memory_gib)
    assert found.device == HARDWARE["h100"].device


def test_a_card_without_a_row_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_card(monkeypatch, name="NVIDIA H100 PCIe", total_gib=79.2)
    speed = DeviceSpeed(tflop_per_s=400.0, memory_gib_per_s=1500.0)
    link = LinkSpeed(d2h_gib_per_s=40.0, h2d_gib_per_s=41.0)
    monkeypatch.setattr(device_speeds, "measure_device", lambda device: speed)
    monkeypatch.setattr(device_speeds, "measure_link", lambda device: link)
    found = hardware_of(CUDA)
    assert (found.device.tflop_per_s, found.link.h2d_gib_per_s) == (400.0, 41.0)
    assert (found.kernels.num_multiprocessors, found.kernels.capability) == (114, 90)


def test_sparse_gradients_have_bytes_too() -> None:
    rows, width = torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 2, bias=False)
    width(rows(torch.tensor([1, 2, 5]))).sum().backward()
    rows_bytes, indices_bytes = 3 * 4 * 4, 3 * 8
    parameters = [*rows.parameters(), *width.parameters(), torch.nn.Parameter(torch.ones(3))]
    assert gradient_bytes(parameters) == rows_bytes + indices_bytes + 4 * 2 * 4


def test_what_is_free_on_other_accelerators_is_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"mem_get_info": (6 * GIB, 16 * GIB), "memory_reserved": 3 * GIB, "memory_allocated": 7}
    for function, answer in facts.items():
        monkeypatch.setattr(torch.xpu, function, lambda *_, answer=answer: answer)
    limit = device_limit.device_limit(XPU, None)
    assert limit is not None
    assert (limit.nbytes, limit.allocated_bytes) == (int(9 * GIB * 0.99), 7)
    for device in ("cpu", "meta"):
        assert device_limit.device_limit(torch.device(device), None) is None
        given = device_limit.device_limit(torch.device(device), 2.0)
        assert given is not None and given.allocated_bytes == 0
