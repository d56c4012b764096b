"""Speeds of a device and of its link to the host, as simulation and prediction take them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hf_pyao.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """Speeds of a device. An operation takes the longer of arithmetic and memory traffic."""

    tflop_per_s: float
    memory_gib_per_s: float
    launch_us: float = 3.0
    """Fixed cost of each operation."""
    collective_gib_per_s: float | None = None
    """What the device receives of collectives, as long as they run; None: they take no time."""

    def __post_init__(self) -> None:
        """Check the speeds.

        Raises:
            ConfigError: a speed is not positive.
        """
        _check_speeds(self, "tflop_per_s", "memory_gib_per_s")
        _check_delay(self, "launch_us")
        if self.collective_gib_per_s is not None:
            _check_speeds(self, "collective_gib_per_s")

    def op_ms(self, flops: float, nbytes: float) -> float:
        """Return how long an operation takes."""
        compute_ms = flops / (self.tflop_per_s * 1e9)
        memory_ms = nbytes / GIB / self.memory_gib_per_s * 1e3
        return max(compute_ms, memory_ms) + self.launch_us / 1e3


@dataclass(frozen=True, kw_only=True)
class DiskModel:
    """A disk below the host: for weights, or for saved tensors too. GiB are 2**30 bytes."""

    read_gib_per_s: float
    write_gib_per_s: float | None = None
    """None: no saved tensors go there, weights alone."""
    host_bytes: float = math.inf
    """Host memory for streamed weights and saved tensors: of these, what finds no room in it goes
    to the disk."""
    memory_bytes: int = 256 * 2**20
    """Host memory in front of the disk, through which the bytes pass."""

    def __post_init__(self) -> None:
        """Check the speeds.

        Raises:
            ConfigError: a speed is not positive.
        """
        _check_speeds(self, "read_gib_per_s")
        if self.write_gib_per_s is not None:
            _check_speeds(self, "write_gib_per_s")

    def room_for_saved(self, weights_bytes: float) -> float:
        """Return the host memory for saved tensors beside *weights_bytes* of streamed weights."""
        return max(0.0, self.host_bytes - weights_bytes)

    @property
    def takes_saved(self) -> bool:
        """True if saved tensors go there that find no room on the host."""
        return self.write_gib_per_s is not None

    def write_ms(self, nbytes: float) -> float:
        """Return how long the disk writes *nbytes*; infinite where it is not written."""
        speed = self.write_gib_per_s
        return math.inf if speed is None else nbytes / GIB / speed * 1e3

    def read_ms(self, nbytes: float) -> float:
        """Return how long the disk reads *nbytes*."""
        return nbytes / GIB / self.read_gib_per_s * 1e3


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """Speeds of a device's link and of host memory. GiB are 2**30 bytes."""

    d2h_gib_per_s: float
    """Device to host."""
    h2d_gib_per_s: float
    """Host to device."""
    copy_engines: int = 2
    """2: both directions at once; 1: one copy at a time, as on many consumer GPUs (PyAO paper,
    section 8.4)."""
    host_memory_gib_per_s: float = math.inf
    """What all accesses to host memory share (PyAO paper, section 8.2)."""
    latency_us: float = 0.0
    """Fixed cost of each copy."""
    disk: DiskModel | None = None
    """What is below the host; None: nothing."""

    def __post_init__(self) -> None:
        """Check the speeds.

        Raises:
            ConfigError: a speed is not positive, or ``copy_engines`` is neither 1 nor 2.
        """
        _check_speeds(self, "d2h_gib_per_s", "h2d_gib_per_s", "host_memory_gib_per_s")
        _check_delay(self, "latency_us")
        if self.copy_engines not in (1, 2):
            raise ConfigError(
                f"copy_engines is {self.copy_engines}; expected 1 or 2.", key="wrong-argument"
            )

    def copy_ms(self, direction: str, nbytes: int) -> float:
        """Return how long a copy takes when nothing else runs."""
        speed = self.d2h_gib_per_s if direction == "offload" else self.h2d_gib_per_s
        return nbytes / GIB / speed * 1e3 + self.latency_us / 1e3

    def read_ms(self, nbytes: float) -> float:
        """Return how long the disk reads *nbytes*; 0 where there is no disk."""
        return 0.0 if self.disk is None else self.disk.read_ms(nbytes)


def _check_speeds(model: Any, *names: str) -> None:
    for name in names:
        value = getattr(model, name)
        if not value > 0:
            raise ConfigError(
                f"{name} is {value}; expected a positive speed.", key="wrong-argument"
            )


def _check_delay(model: Any, name: str) -> None:
    value = getattr(model, name)
    if not 0 <= value < math.inf:
        raise ConfigError(
            f"{name} is {value}; expected a time of 0 or more, in microseconds.",
            key="wrong-argument",
        )
