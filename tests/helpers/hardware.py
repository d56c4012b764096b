"""A device and a link that were made up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_pyao.plan.hardware.presets import Hardware
from hf_pyao.plan.hardware.speeds import DeviceModel, LinkModel

HARDWARE = Hardware(
    name="made up",
    device=DeviceModel(tflop_per_s=0.05, memory_gib_per_s=2.0, launch_us=1.0),
    link=LinkModel(d2h_gib_per_s=0.3, h2d_gib_per_s=0.3),
    memory_gib=1,
    source="made up, so that some copies are hidden and others are not",
)


def pretend_card(
    patch: pytest.MonkeyPatch,
    *,
    total_gib: float,
    free_gib: float = 0.0,
    fraction: float = 1.0,
    name: str = "made up",
) -> None:
    """Make ``torch.cuda`` tell of a card, and of the part of it that this process may use."""
    total_bytes, free_bytes = int(total_gib * 2**30), int(free_gib * 2**30)
    facts = SimpleNamespace(total_memory=total_bytes, major=9, minor=0, multi_processor_count=114)
    for function, answer in {
        "is_available": True,
        "get_device_name": name,
        "get_device_properties": facts,
        "get_per_process_memory_fraction": fraction,
        "mem_get_info": (free_bytes, total_bytes),
        "memory_allocated": 0,
        "memory_reserved": 2**30,
    }.items():
        patch.setattr(torch.cuda, function, lambda *_, answer=answer: answer)
    patch.setattr(torch.backends.cudnn, "version", lambda: 91900)
