"""Transports: how bytes cross the link; what they promise, and the one that copies at once.

[Note: Stream order]
Three queues run beside each other: compute (the user's current stream, asked for live at every
call), device-to-host copies, and host-to-device copies.
- A copy to the host starts behind the compute that produced its source, and behind the last copy
  that still reads the host buffer it writes (``after``).
- A copy to the device starts behind the compute queued so far, because its target may be memory
  that compute has just finished with (targets are allocated on the compute stream), and behind the
  copy that filled its host buffer (``after``).
- Compute reads a reloaded buffer, or reuses the memory of an offloaded one, behind ``wait``.
Every wait is an event wait on a stream. Nothing here stops the host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from hf_pyao.metrics import MicroBatchStats


@runtime_checkable
class Ticket(Protocol):
    """Stands for one queued copy."""

    @property
    def nbytes(self) -> int:
        """Bytes that it copies."""
        ...

    @property
    def queue(self) -> object:
        """The queue that it runs in; copies of one queue run in order."""
        ...

    @property
    def order(self) -> int:
        """Position in its queue."""
        ...


@dataclass(frozen=True)
class Bandwidth:
    """Speed of the link in GiB/s (2**30 bytes); None where it was not measured."""

    d2h_gib_per_s: float | None
    h2d_gib_per_s: float | None


@runtime_checkable
class Transport(Protocol):
    """Copies dense tensors between the device and the host.

    ``src`` and ``dst`` have the same dtype, size and strides, and no gaps; what counts is their
    bytes (:func:`~hf_pyao.runtime.layout.bytes_of` views them). The caller keeps ``src`` alive and
    unchanged, and ``dst`` alive and unread, until it has waited for the ticket. ``str()`` of
    ``label`` names the tensor in messages. See [Note: Stream order].
    """

    name: str
    needs_pinned_memory: bool

    def handles(self, device: torch.device) -> bool:
        """Say whether tensors on *device* can be moved by this transport."""
        ...

    def offload(
        self, src: torch.Tensor, dst: torch.Tensor, *, after: Sequence[Any] = (), label: object = ""
    ) -> Any:
        """Queue the copy of *src*, on the device, to *dst*, on the host; return its ticket."""
        ...

    def reload(
        self, src: torch.Tensor, dst: torch.Tensor, *, after: Sequence[Any] = (), label: object = ""
    ) -> Any:
        """Queue the copy of *src*, on the host, to *dst*, on the device; return its ticket."""
        ...

    def wait(self, ticket: Any) -> None:
        """Order what compute does from now on behind the copy."""
        ...

    def retire(self, ticket: Any) -> None:
        """Order whatever reuses the memory of a reload's target behind the copy.

        For targets that are let go unread; it may be called on any thread.
        """
        ...

    def is_done(self, ticket: Any) -> bool:
        """Say whether the copy has finished, as far as the host knows, without waiting."""
        ...

    def host_released(self, data: torch.Tensor, after: Any) -> None:
        """Take note that host bytes *data* were given back; *after* may still read them."""
        ...

    def collect(self, stats: MicroBatchStats) -> None:
        """Move the times measured since the last call into *stats*."""
        ...

    def bandwidth(self) -> Bandwidth:
        """Return the link's speed as far as copies so far tell."""
        ...


@dataclass(eq=False, slots=True)
class DoneTicket:
    """A copy that had finished when the call returned."""

    nbytes: int
    queue: object = None
    order: int = 0


class BlockingTransport:
    """Copies at once, on the caller's thread and stream: for CPUs, and where streams are missing.

    On a CPU the host stands in for the device: bytes are counted and gradients are right, but no
    memory is saved.
    """

    name = "blocking"
    needs_pinned_memory = False

    def __init__(self) -> None:
        self._seconds = {"offload": 0.0, "reload": 0.0}
        self._total_seconds = {"offload": 0.0, "reload": 0.0}
        self._total_bytes = {"offload": 0, "reload": 0}

    def handles(self, device: torch.device) -> bool:
        """Take tensors on any device but ``meta``."""
        return device.type != "meta"

    def offload(
        self, src: torch.Tensor, dst: torch.Tensor, *, after: Sequence[Any] = (), label: object = ""
    ) -> DoneTicket:
        """Copy to the host now."""
        return self._copy("offload", src, dst)

    def reload(
        self, src: torch.Tensor, dst: torch.Tensor, *, after: Sequence[Any] = (), label: object = ""
    ) -> DoneTicket:
        """Copy to the device now."""
        return self._copy("reload", src, dst)

    def wait(self, ticket: DoneTicket) -> None:
        """Do nothing: the copy is done."""

    def retire(self, ticket: DoneTicket) -> None:
        """Do nothing: the copy is done."""

    def is_done(self, ticket: DoneTicket) -> bool:
        """Return True."""
        return True

    def host_released(self, data: torch.Tensor, after: Any) -> None:
        """Do nothing."""

    def collect(self, stats: MicroBatchStats) -> None:
        """Report the copies' time; compute stood still meanwhile, so all of it is stall."""
        stats.stall_forward_ms += self._seconds["offload"] * 1e3
        stats.stall_backward_ms += self._seconds["reload"] * 1e3
        stats.transfer_ms += sum(self._seconds.values()) * 1e3
        self._seconds = dict.fromkeys(self._seconds, 0.0)

    def bandwidth(self) -> Bandwidth:
        """Return bytes over time of all copies so far."""
        return Bandwidth(*(self._speed(direction) for direction in ("offload", "reload")))

    def _speed(self, direction: str) -> float | None:
        seconds = self._total_seconds[direction]
        return self._total_bytes[direction] / 2**30 / seconds if seconds else None

    def _copy(self, direction: str, src: torch.Tensor, dst: torch.Tensor) -> DoneTicket:
        start = time.perf_counter()
        dst.copy_(src)
        seconds = time.perf_counter() - start
        nbytes = src.nbytes
        self._seconds[direction] += seconds
        self._total_seconds[direction] += seconds
        self._total_bytes[direction] += nbytes
        return DoneTicket(nbytes)
