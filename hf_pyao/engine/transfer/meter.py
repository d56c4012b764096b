"""What a mover counts, and how bytes are named: all that it knows of their owner."""

from __future__ import annotations

from typing import Protocol

from hf_pyao.engine.stores.store import DiskMeter


class Meter(Protocol):
    """Counts bytes that move.

    :class:`~hf_pyao.metrics.MicroBatchStats` is the meter of activations. What moves other bytes,
    such as weights, brings a meter of its own.
    """

    offloaded_bytes: int
    """Bytes that left the device, before any codec."""
    reloaded_bytes: int
    """Bytes that came back, before any codec."""
    link_bytes: int
    """Bytes that crossed the link in either direction, after the codec."""
    kept_bytes: dict[str, int]
    """Bytes that were to leave and stay, by reason. A reason that is not there counts as 0."""


class LinkMeter(Protocol):
    """Counts what copies took, and the memory that they needed."""

    transfer_ms: float
    """Time in which copies ran, both directions added."""
    stall_forward_ms: float
    """Time in which forward compute waited for copies."""
    stall_backward_ms: float
    """Time in which backward compute waited for copies."""
    device_peak_bytes: int
    """Most device memory allocated so far, where the device counts it."""
    host_peak_bytes: int
    """Most bytes that were used at once where moved bytes are kept."""
    pool_bytes: int
    """Bytes that are reserved there, in use or not."""


class MoverMeter(LinkMeter, DiskMeter, Protocol):
    """Counts that too, and what went to a disk."""

    disk_peak_bytes: int
    """Most bytes that were on a disk at once."""


class Label(Protocol):
    """Names bytes: ``str()`` of it in messages, its layer in the ranges of a profiler."""

    @property
    def layer(self) -> str:
        """The layer, or other part of the model, that the bytes belong to."""
        ...
