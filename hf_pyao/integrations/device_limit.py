"""How many bytes of tensors a device may hold: what is given, or what it has free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from hf_pyao.config import GIB, PyAOConfig
from hf_pyao.metrics import format_bytes

MARGIN = 0.04
"""Share of what is free that is left alone: workspaces, fragmentation."""


class DeviceLimit(NamedTuple):
    """Most bytes of tensors on a device."""

    nbytes: int
    """For the process's tensors in all."""
    allocated_bytes: int
    """What its tensors take now; 0 where no one counts."""
    how: str
    """Where the limit is from, in words."""


def device_limit(
    device: torch.device, device_memory_gib: float | None, label: str = "device_memory_gib"
) -> DeviceLimit | None:
    """Return the limit for this process; None if none is known.

    Args:
        device: where the model is.
        device_memory_gib: what is given, in GiB; None: what is free, less :data:`MARGIN`.
        label: how messages call what is given.
    """
    allocated = _allocated_bytes(device)
    if device_memory_gib is not None:
        return DeviceLimit(
            int(device_memory_gib * GIB), allocated, f"{label} {device_memory_gib:g} GiB"
        )
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    nbytes = int((free + reserved) * (1 - MARGIN))
    return DeviceLimit(nbytes, allocated, f"{format_bytes(nbytes)} free on {device}")


def why_unlimited(device: torch.device, config: PyAOConfig) -> str:
    """Say what is done where :func:`device_limit` knows of no limit, and what to give."""
    label = config.label("device_memory_gib")
    if device.type == "cpu":
        return (
            "offloads nothing: on a CPU there is no device memory to free. Give "
            f"{label} to plan for a device of that size, or choose policy 'all'"
        )
    return f"offloads everything: how much memory {device} has is not known. Give {label}"


def _allocated_bytes(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def beside_bytes(
    limit: DeviceLimit, resident_bytes: int, parameters: Iterable[torch.nn.Parameter]
) -> int:
    """Return what of the device other tensors take between two micro-batches.

    Optimizer states, master weights, batches that were made ahead: not the weights and buffers
    (*resident_bytes*), and not gradients, which a recorded step has of its own.
    """
    gradients = sum(
        each.grad.numel() * each.grad.element_size() for each in parameters if each.grad is not None
    )
    return max(0, limit.allocated_bytes - resident_bytes - gradients)
