"""How fast the link between device and host is, measured with plain copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_pyao.plan.hardware.device_speed import median_s

COPY_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """Copy speeds in GiB/s (2**30 bytes), pinned host memory unless said otherwise.

    Medians over copies of :data:`COPY_BYTES`, timed on a drained device. None: not measured.
    """

    d2h_gib_per_s: float | None = None
    """Device to host, alone."""
    h2d_gib_per_s: float | None = None
    """Host to device, alone."""
    both_gib_per_s: float | None = None
    """Both at once on two streams, bytes of both directions added."""
    d2h_pageable_gib_per_s: float | None = None
    """Device to host into memory that is not pinned."""

    @property
    def is_duplex(self) -> bool | None:
        """Whether both directions run beside each other; None if that was not measured.

        One copy engine moves as much in both directions together as in one.
        """
        if not self.both_gib_per_s or not self.d2h_gib_per_s or not self.h2d_gib_per_s:
            return None
        return self.both_gib_per_s > 1.3 * max(self.d2h_gib_per_s, self.h2d_gib_per_s)


def measure_link(device: torch.device) -> LinkSpeed:
    """Measure the link of *device*; a CPU has none."""
    if device.type == "cpu":
        return LinkSpeed()
    on_device = [torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    pinned = [torch.zeros(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    pageable = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    streams = [torch.Stream(device) for _ in range(2)]

    def d2h() -> None:
        with streams[0]:
            pinned[0].copy_(on_device[0], non_blocking=True)

    def h2d() -> None:
        with streams[1]:
            on_device[1].copy_(pinned[1], non_blocking=True)

    def both() -> None:
        d2h()
        h2d()

    def d2h_pageable() -> None:
        pageable.copy_(on_device[0])

    return LinkSpeed(
        d2h_gib_per_s=_speed(d2h, COPY_BYTES, device),
        h2d_gib_per_s=_speed(h2d, COPY_BYTES, device),
        both_gib_per_s=_speed(both, 2 * COPY_BYTES, device),
        d2h_pageable_gib_per_s=_speed(d2h_pageable, COPY_BYTES, device),
    )


def _speed(copy: Callable[[], None], nbytes: int, device: torch.device) -> float:
    """Return the median speed of *copy* in GiB/s."""
    return nbytes / 2**30 / median_s(copy, device, 1)
