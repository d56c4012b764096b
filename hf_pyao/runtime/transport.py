"""Transports: how bytes cross the link; what they promise, and the one that copies at once.

[Note: Stream order]
Queues run beside each other: compute (one stream or several, the user's), device-to-host copies,
and host-to-device copies. Memory that is let go returns to the stream that it was allocated on, and
what that stream runs next may write to it at once. Hence:
- A storage has a home (``compute_streams.Home``): the stream that was current when it was packed,
  on which autograd runs the nodes that saved it. What is made for it on the device (its encoded
  payload, the target of its reload, decoded or rebuilt bytes) is allocated on its home and written
  there, whichever stream is current when that happens.
- A copy belongs to the compute stream that it was queued from (``Ticket.compute``): the home, too,
  since that is made current meanwhile.
- A copy to the host starts behind what its compute stream has queued, which produced its source,
  and behind the copies that still use the host buffer it writes (``after``).
- A copy to the device starts behind what its compute stream has queued, which may still use the
  memory of its target, and behind the copy that filled its host buffer (``after``).
- ``wait`` orders the copy's compute stream behind it, before that reads a reloaded buffer, or
  before memory that the copy uses is let go.
- Other streams may ask for a storage, too (nodes on two streams saved it, or a prefetch): visitors.
  A visitor waits for the home before it reads; the home waits for its visitors before memory of the
  home's is let go.
- The source of a copy to the host is the user's, and may have been allocated on any stream. Where
  several compute streams were seen, all of them wait for the home (and its visitors) before it is
  let go. It is let go only once nothing else holds it (``OffloadWindow.let_go``): who does may yet
  queue readers, which autograd's hold on a saved tensor would have protected.
- A host buffer is written behind the newest copy of each queue that used it before, whichever
  transport that queue belongs to ([Note: Buffer lifetime] in ``stores.host_pool``).
Every wait is an event wait on a stream. Nothing here stops the host. What is not covered: a stream
that allocates what layers save and never runs anything of a layer that is saved is not known.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from hf_pyao.metrics import MicroBatchStats
from hf_pyao.runtime.compute_streams import current_stream


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

    @property
    def compute(self) -> torch.Stream | None:
        """The compute stream that was current when it was queued; None on a CPU."""
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
        """Order what the ticket's compute stream does from now on behind the copy."""
        ...

    def retire(self, ticket: Any) -> None:
        """Order whatever reuses the memory of a reload's target behind the copy.

        As :meth:`wait`, for targets that are let go unread; it may be called on any thread.
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
    compute: torch.Stream | None = None
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
        compute = current_stream((src if direction == "offload" else dst).device)
        start = time.perf_counter()
        dst.copy_(src)
        seconds = time.perf_counter() - start
        nbytes = src.nbytes
        self._seconds[direction] += seconds
        self._total_seconds[direction] += seconds
        self._total_bytes[direction] += nbytes
        return DoneTicket(nbytes, compute)
