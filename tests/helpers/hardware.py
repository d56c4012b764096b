"""A device and a link that were made up."""

from __future__ import annotations

from hf_pyao.plan.hardware.presets import Hardware
from hf_pyao.plan.hardware.speeds import DeviceModel, LinkModel

HARDWARE = Hardware(
    name="made up",
    device=DeviceModel(tflop_per_s=0.05, memory_gib_per_s=2.0, launch_us=1.0),
    link=LinkModel(d2h_gib_per_s=0.3, h2d_gib_per_s=0.3),
    memory_gib=1,
    source="made up, so that some copies are hidden and others are not",
)
