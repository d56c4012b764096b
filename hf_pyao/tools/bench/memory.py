"""Readings of device and host memory, where the platform gives them; None where it does not."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch

from hf_pyao.errors import ConfigError

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def pick_device(name: str) -> torch.device:
    """Return the device called *name*; ``auto`` is the accelerator if one can be used.

    Raises:
        ConfigError: no such device can be used here.
    """
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    if name == "auto":
        # MPS memory is the host's: there is nothing to offload to.
        usable = accelerator is not None and accelerator.type != "mps"
        return torch.device(accelerator.type, 0) if usable and accelerator else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"device is {name!r}; expected auto, cpu, cuda, cuda:1, ...", key="setting-value"
        ) from error
    if device.type == "cpu":
        return device
    if accelerator is None or accelerator.type != device.type:
        found = "none" if accelerator is None else repr(accelerator.type)
        raise ConfigError(
            f"device is {name!r}, and torch finds {found} here. Give --device auto, or install a "
            "torch built for that device.",
            key="needs-gpu",
        )
    return torch.device(device.type, device.index or 0)


class DeviceMemory:
    """Counts of the device's caching allocator; a CPU has none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts = device.type != "cpu"

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        if self._counts:
            torch.accelerator.synchronize(self._device)

    def allocated_bytes(self) -> int | None:
        """Return the bytes in tensors now."""
        return torch.accelerator.memory_allocated(self._device) if self._counts else None

    def reset_peaks(self) -> None:
        """Start the peaks anew."""
        if self._counts:
            torch.accelerator.reset_peak_memory_stats(self._device)

    def peak_allocated_bytes(self) -> int | None:
        """Return the most bytes in tensors since the reset."""
        return torch.accelerator.max_memory_allocated(self._device) if self._counts else None

    def peak_reserved_bytes(self) -> int | None:
        """Return the most bytes that the allocator held since the reset."""
        return torch.accelerator.max_memory_reserved(self._device) if self._counts else None

    def total_bytes(self) -> int | None:
        """Return the device's memory; None where nobody tells."""
        properties = device_properties(self._device) if self._counts else None
        total_bytes = getattr(properties, "total_memory", None)
        return None if total_bytes is None else int(total_bytes)

    def context_bytes(self) -> int | None:
        """Return what of the device's memory no tensor can have; None where nobody tells.

        The driver's part, this process's context with the kernels that it has loaded so far, and
        what other processes hold.
        """
        total_bytes, free_bytes = self.total_bytes(), self.free_bytes()
        if total_bytes is None or free_bytes is None:
            return None
        reserved_bytes = int(torch.accelerator.memory_reserved(self._device))
        return max(0, total_bytes - free_bytes - reserved_bytes)

    def free_bytes(self) -> int | None:
        """Return the bytes of the device that nobody holds; None where nobody tells."""
        if not self._counts:
            return None
        module = torch.get_device_module(self._device)
        if not hasattr(module, "mem_get_info"):
            return None
        return int(module.mem_get_info(self._device)[0])

    def cap(self, cap_gib: float | None) -> None:
        """Let the allocator hold at most *cap_gib* GiB; None: all there is.

        Raises:
            ConfigError: a cap is asked for, and this device's allocator takes none.
        """
        set_fraction = None
        if self._counts:
            module = torch.get_device_module(self._device)
            set_fraction = getattr(module, "set_per_process_memory_fraction", None)
        total_bytes = self.total_bytes()
        if set_fraction is None or total_bytes is None:
            if cap_gib is not None:
                raise ConfigError(
                    f"memory_cap_gib is {cap_gib}, and the allocator of {self._device} takes no "
                    "cap. Drop the cap, or measure on a device whose allocator takes one, as "
                    "CUDA's does.",
                    key="setting-without-effect",
                )
            return
        fraction = 1.0 if cap_gib is None else min(1.0, cap_gib * 2**30 / total_bytes)
        set_fraction(fraction, self._device)

    def release_caches(self, *, keep_pinned: bool = False) -> None:
        """Give back what nobody uses: dead objects, cached device memory and pinned memory."""
        gc.collect()
        if not self._counts:
            return
        self.synchronize()
        torch.accelerator.empty_cache()
        if not keep_pinned and hasattr(torch._C, "_host_emptyCache"):
            torch._C._host_emptyCache()


def device_properties(device: torch.device) -> Any:
    """Return what torch tells of a device; None for a CPU, and where it tells nothing."""
    if device.type == "cpu":
        return None
    tell = getattr(torch.get_device_module(device), "get_device_properties", None)
    return None if tell is None else tell(device)


class HostMemory:
    """What the process takes of host memory."""

    def __init__(self, device: torch.device) -> None:
        module = None if device.type == "cpu" else torch.get_device_module(device)
        self._pinned_stats = getattr(module, "host_memory_stats", None)
        self._reset_pinned_peaks = getattr(module, "reset_peak_host_memory_stats", None)

    def rss_bytes(self) -> int | None:
        """Return the resident bytes now."""
        return _status_bytes("VmRSS")

    def reset_peaks(self) -> None:
        """Start the peaks anew, as far as the platform lets one."""
        try:
            _CLEAR_REFS.write_text("5", encoding="ascii")  # resets VmHWM; see man 5 proc
        except OSError:
            pass  # the peak is then that of the process, which has one trial as a rule
        if self._reset_pinned_peaks is not None:
            self._reset_pinned_peaks()

    def peak_rss_bytes(self) -> int | None:
        """Return the most resident bytes since the reset."""
        peak = _status_bytes("VmHWM")
        if peak is not None or sys.platform == "win32":
            return peak
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def pinned_bytes(self) -> int | None:
        """Return the most bytes that torch's pinned allocator owned, cached ones included.

        None where nobody counts them.
        """
        if self._pinned_stats is None:
            return None
        stats = self._pinned_stats()
        # Releases differ in the name of what the allocator owns; the first is the older one.
        for key in ("reserved_bytes.peak", "allocated_bytes.peak"):
            if key in stats:
                return int(stats[key])
        return None


def _status_bytes(key: str) -> int | None:
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return None
