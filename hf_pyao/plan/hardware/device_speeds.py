"""Speeds of the device that a model is on: known ones, or measured."""

from __future__ import annotations

import dataclasses

import torch

from hf_pyao.errors import ConfigError
from hf_pyao.plan.hardware.device_limit import allocator_cap_bytes
from hf_pyao.plan.hardware.device_speed import measure_device
from hf_pyao.plan.hardware.kernel_settings import settings_of
from hf_pyao.plan.hardware.link_speed import measure_link
from hf_pyao.plan.hardware.presets import Hardware, find_hardware
from hf_pyao.plan.hardware.speeds import GIB, DeviceModel, LinkModel

HOST = Hardware(
    name="cpu",
    device=DeviceModel(tflop_per_s=0.1, memory_gib_per_s=10.0, launch_us=10.0),
    link=LinkModel(d2h_gib_per_s=10.0, h2d_gib_per_s=10.0),
    memory_gib=1.0,
    source="assumed: on a CPU the host stands in for the device",
)
"""What stands for a CPU. Not measured, so that the same run chooses the same."""


def hardware_of(device: torch.device) -> Hardware:
    """Return the speeds of *device* and its link: of its preset, else measured.

    Its memory is no more than this process may have of it, beside the context.

    Raises:
        ConfigError: it is no preset, and nothing could be measured.
    """
    if device.type == "cpu":
        return HOST
    describe = getattr(torch.get_device_module(device), "get_device_name", None)
    name = str(device) if describe is None else str(describe(device))
    try:
        found = find_hardware(name)
    except ConfigError:
        found = _measured(device, name)
    if device.type != "cuda":
        return found
    most_gib = allocator_cap_bytes(device) / GIB + found.context_gib
    return dataclasses.replace(found, memory_gib=min(found.memory_gib, most_gib))


def _measured(device: torch.device, name: str) -> Hardware:
    speed, link = measure_device(device), measure_link(device)
    if not (speed.tflop_per_s and speed.memory_gib_per_s):
        raise ConfigError(
            f"the speed of {name} ({device}) is not known, and was not measured.",
            key="speeds-unknown",
        )
    if not (link.d2h_gib_per_s and link.h2d_gib_per_s):
        raise ConfigError(
            f"the link of {name} ({device}) is not known, and was not measured.",
            key="speeds-unknown",
        )
    kernels = settings_of(device)
    model = LinkModel(d2h_gib_per_s=link.d2h_gib_per_s, h2d_gib_per_s=link.h2d_gib_per_s)
    return Hardware(
        name=name,
        device=DeviceModel(tflop_per_s=speed.tflop_per_s, memory_gib_per_s=speed.memory_gib_per_s),
        link=dataclasses.replace(model, copy_engines=1 if link.is_duplex is False else 2),
        memory_gib=_total_bytes(device) / GIB,
        source="measured",
        num_multiprocessors=kernels.num_multiprocessors,
        capability=kernels.capability,
    )


def _total_bytes(device: torch.device) -> int:
    return int(torch.get_device_module(device).mem_get_info(device)[1])
