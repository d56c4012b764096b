"""How many bytes may be reserved on a device for tensors: what is given, or what it has free."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from hf_pyao.config import GIB
from hf_pyao.errors import ConfigError
from hf_pyao.metrics import format_bytes
from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.training_engines import local_part

MARGIN = 0.01
"""Share of what is free that is left alone: modules that the CUDA context loads when a kernel first
runs. What the allocator loses to fragmentation is replayed:
``plan/predict/allocator_replay.py``."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where a process's allocator settings are read from, the first that is set."""


class DeviceLimit(NamedTuple):
    """Most bytes that may be reserved for tensors on a device."""

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
        device_memory_gib: what is given, in GiB; None: what is free or reserved already, less
            :data:`MARGIN`, and on CUDA no more than :func:`allocator_cap_bytes`. The context is
            there by then, and not a part of it; what other processes hold is not either.
        label: how messages call what is given.
    """
    allocated = _allocated_bytes(device)
    if device_memory_gib is not None:
        return DeviceLimit(
            int(device_memory_gib * GIB), allocated, f"{label} {device_memory_gib:g} GiB"
        )
    module: Any = getattr(torch, device.type, None)
    if not hasattr(module, "mem_get_info"):
        return None
    free, _ = module.mem_get_info(device)
    reserved = getattr(module, "memory_reserved", torch.accelerator.memory_reserved)
    free_bytes = int((free + reserved(device)) * (1 - MARGIN))
    is_capped = device.type == "cuda"
    nbytes = min(free_bytes, allocator_cap_bytes(device)) if is_capped else free_bytes
    how = "free" if nbytes == free_bytes else "for this process (its memory fraction)"
    return DeviceLimit(nbytes, allocated, f"{format_bytes(nbytes)} {how} on {device}")


def allocator_cap_bytes(device: torch.device) -> int:
    """Return the most bytes that torch's allocator may reserve on *device*, a CUDA device.

    All of its memory, or what ``torch.cuda.set_per_process_memory_fraction`` leaves of that.
    """
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    return int(total_bytes * torch.cuda.get_per_process_memory_fraction(device))


def allocator_settings(device: torch.device) -> AllocatorSettings | None:
    """Return the settings of *device*'s caching allocator; None if it has none that is known.

    Accelerators other than CUDA are taken to follow the same rules, as torch's allocator for XPU
    does. On a CPU nothing is reserved, and CUDA's ``cudaMallocAsync`` backend has other rules.
    """
    if device.type in ("cpu", "mps", "meta"):
        return None
    if device.type == "cuda" and torch.cuda.get_allocator_backend() != "native":
        return None
    known = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    text = known() if known is not None else ""
    if not text:
        text = next(filter(None, map(os.environ.get, ALLOCATOR_VARIABLES)), "")
    try:
        return AllocatorSettings.parse(text)
    except ConfigError:  # torch has taken it, and knows settings that are not replayed
        return AllocatorSettings()


def release_cached(device: torch.device) -> None:
    """Let *device*'s allocator give back segments in which nothing is allocated.

    Segments that one kind of step has cut up may not serve another, and together they may be more
    than the device holds. The device is waited for.
    """
    empty_cache = getattr(torch.get_device_module(device), "empty_cache", None)
    if empty_cache is not None:
        empty_cache()


def why_unlimited(device: torch.device, label: str = "device_memory_gib") -> str:
    """Say what is done where :func:`device_limit` knows of no limit, and that *label* gives one."""
    if device.type == "cpu":
        return (
            "offloads nothing: on a CPU there is no device memory to free. Give "
            f"{label} to plan for a device of that size, or choose policy 'all'"
        )
    return f"offloads everything: how much memory {device} has is not known. Give {label}"


def _allocated_bytes(device: torch.device) -> int:
    module = getattr(torch, device.type, None)
    counted = getattr(module, "memory_allocated", None)
    return 0 if counted is None else int(counted(device))


def beside_bytes(
    limit: DeviceLimit, resident_bytes: int, parameters: Iterable[torch.nn.Parameter]
) -> int:
    """Return what of the device other tensors take between two micro-batches.

    Optimizer states, master weights, batches that were made ahead: not the weights and buffers
    (*resident_bytes*), and not gradients, which a recorded step has of its own.
    """
    return max(0, limit.allocated_bytes - resident_bytes - gradient_bytes(parameters))


def gradient_bytes(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Return the bytes of the gradients that are there; sparse ones count what they hold."""
    gradients = (local_part(each.grad) for each in parameters if each.grad is not None)
    return sum(
        each._indices().nbytes + each._values().nbytes
        if each.layout is torch.sparse_coo
        else each.nbytes
        for each in gradients
    )
