"""How fast a device computes and how fast it reads its memory, measured with two operations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

MATRIX_SIZE = 4096
COPY_BYTES = 512 * 2**20
NUM_RUNS = 8


@dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    """What kernels reach. None: not measured."""

    tflop_per_s: float | None = None
    """Product of two bfloat16 matrices of 4096 rows and columns."""
    memory_gib_per_s: float | None = None
    """A copy within the device's memory, bytes read and written together."""


def measure_device(device: torch.device) -> DeviceSpeed:
    """Measure *device*; of a CPU nothing is."""
    if device.type == "cpu":
        return DeviceSpeed()
    left = torch.randn(MATRIX_SIZE, MATRIX_SIZE, dtype=torch.bfloat16, device=device)
    right, product = torch.randn_like(left), torch.empty_like(left)
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product_s = median_s(lambda: torch.mm(left, right, out=product), device, 4)
    copy_s = median_s(lambda: target.copy_(source), device, 4)
    return DeviceSpeed(
        tflop_per_s=2 * MATRIX_SIZE**3 / product_s / 1e12,
        memory_gib_per_s=2 * COPY_BYTES / 2**30 / copy_s,
    )


def median_s(work: Callable[[], object], device: torch.device, num_each: int) -> float:
    """Return the median time of *work*, which runs *num_each* times between two readings.

    Several times, where launching is not to count. The first readings warm up.
    """
    seconds = []
    for _ in range(NUM_RUNS + 1):
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        for _ in range(num_each):
            work()
        torch.accelerator.synchronize(device)
        seconds.append((time.perf_counter() - start) / num_each)
    return statistics.median(seconds[1:])
