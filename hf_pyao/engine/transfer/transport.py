"""Transports: how bytes cross the link; what they promise, and the one that copies at once.

[Note: Stream order]
Queues run beside each other: compute, device-to-host copies, and host-to-device copies. Memory that
is let go returns to the stream that it was allocated on, and what that stream runs next may write
to it at once. Hence:
- Of one forward only what is saved on the compute stream on which it began is moved or rebuilt;
  that stream is its home. What is saved on another stream stays (``Stays.OTHER_STREAM``). Autograd
  runs a node on the stream of its forward, so that the home asks for it again. What is made for it
  on the device (its encoded payload, the target of its reload, decoded or rebuilt bytes) is
  allocated on its home and written there, whichever stream is current when that happens.
- A copy belongs to the compute stream that it was queued from (``compute`` of its ticket): the
  home, too, since that is made current meanwhile.
- A copy to the host starts behind what its compute stream has queued, which produced its source,
  and behind the copies that still use the host buffer it writes (``after``).
- A copy to the device starts behind what its compute stream has queued, which may still use the
  memory of its target, and behind the copy that filled its host buffer (``after``). What was
  promised its target before, and comes from a disk meanwhile, starts behind what compute had queued
  when that was promised (``behind``).
- ``wait`` orders the copy's compute stream behind it, before that reads a reloaded buffer, or
  before memory that the copy uses is let go. Copies of one queue run in order: for one compute
  stream a wait for the newest of them stands for all that were queued from it before.
- Another stream that asks for a tensor (a look at a node) waits for the home, and the allocator is
  told of it (``record_stream``).
- A host buffer is written behind the newest copy of each queue that used it before, whichever
  transport that queue belongs to ([Note: Buffer lifetime] in ``stores.host_pool``).
Every wait is an event wait on a stream. Nothing here stops the host. The source of a copy to the
host is the user's, and is let go earlier than autograd would. If it was allocated on another stream
than the home, or another stream reads it and saves nothing of it, the user must have told the
allocator so (``record_stream``).

[Note: Window]
The host queues work long before the device runs it: often the whole backward while the device is
still in forward. The answer to ``is_done`` is then nearly always False, and says nothing about what
will be in flight when the device gets there. So the window (``schedule``) bounds what is in flight
in the order of the streams, and its decisions follow from the order of the calls alone:
- A payload is in flight from the call that queues its copy to the host until compute is ordered
  behind that copy (and nothing else holds the memory): only then may an allocation on the compute
  stream reuse it. Bytes that were brought back are in flight until they are asked for.
- Forward: before more than the window waits to leave, compute is ordered behind the oldest copy. An
  event wait on a copy that the device has finished costs the device nothing.
- Backward reads in place what still waits to leave: those are the newest tensors, which it needs
  first. They fill the window as tensors do that were brought back ahead, and nothing is brought
  back in their place.
- As soon as backward is done with one of them, a reload may take its place: compute is ordered
  behind that copy, its payload is let go, and the reload is queued. This happens at each point
  where something may be brought back, and for as many payloads as the next reload needs. If room
  were made for all reloads at once, backward would have to bring back what it could read in place.
- What waits for a later backward than the one that runs (interleaved micro-batches, other engines
  that share the link) makes room, too, the oldest first.
``is_done`` is asked in forward only. Where the host is not ahead, payloads are then let go earlier.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypedDict, runtime_checkable

import torch

from hf_pyao.engine.transfer.compute_streams import current_stream

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LinkMeter(Protocol):
    """Counts what copies took: figures of micro-batches, and of streamed weights."""

    transfer_ms: float
    """Time in which copies ran, both directions added."""
    stall_forward_ms: float
    """Time in which forward compute waited for copies."""
    stall_backward_ms: float
    """Time in which backward compute waited for copies."""
    device_peak_bytes: int
    """Most device memory allocated so far, where the device counts it."""


@dataclass
class LinkTimes:
    """What the copies of one engine took since they were collected last, in ms."""

    transfer_ms: float = 0.0
    """Time in which copies ran, both directions added."""
    stall_forward_ms: float = 0.0
    """Time in which forward compute waited for copies."""
    stall_backward_ms: float = 0.0
    """Time in which backward compute waited for copies."""

    def add_stall(self, elapsed_ms: float, *, in_backward: bool) -> None:
        """Add a time in which compute waited."""
        if in_backward:
            self.stall_backward_ms += elapsed_ms
        else:
            self.stall_forward_ms += elapsed_ms

    def move_to(self, meter: LinkMeter) -> None:
        """Add all of it to *meter*, and start again from zero."""
        meter.transfer_ms += self.transfer_ms
        meter.stall_forward_ms += self.stall_forward_ms
        meter.stall_backward_ms += self.stall_backward_ms
        self.transfer_ms = self.stall_forward_ms = self.stall_backward_ms = 0.0


@dataclass(frozen=True)
class Bandwidth:
    """Speed of the link in GiB/s (2**30 bytes); None where it was not measured."""

    d2h_gib_per_s: float | None
    h2d_gib_per_s: float | None


class CopiedSoFar(NamedTuple):
    """Bytes and time, in ms, of all copies, by direction (``"offload"`` or ``"reload"``)."""

    nbytes: dict[str, int]
    elapsed_ms: dict[str, float]

    def bandwidth(self) -> Bandwidth:
        """Return bytes over time."""
        d2h, h2d = (
            self.nbytes[way] / 2**30 / (self.elapsed_ms[way] / 1e3)
            if self.elapsed_ms.get(way)
            else None
            for way in ("offload", "reload")
        )
        return Bandwidth(d2h, h2d)


class CopyOptions(TypedDict, total=False):
    """What a transport is told of a copy beside its tensors."""

    after: Sequence[Any]
    """Tickets of copies that come before."""
    label: object
    """``str()`` of it names the tensor in messages."""
    times: LinkTimes | None
    """Whose time it is."""
    behind: Any
    """Of a copy to the device, a :meth:`Transport.mark`: the copy starts behind what compute had
    queued then, and what was queued since does not use its target. None: behind all that is queued
    by now."""


HostReleased: TypeAlias = Callable[[torch.Tensor, Any], None]
"""Called with host bytes that were given back, and the ticket of the copy that may still read them
(None if there is no such copy)."""


@runtime_checkable
class Transport(Protocol):
    """Copies dense tensors between the device and the host.

    ``src`` and ``dst`` have the same dtype, size and strides, and no gaps; what counts is their
    bytes (:func:`~hf_pyao.engine.transfer.layout.bytes_of` views them). The caller keeps ``src``
    alive and unchanged, and ``dst`` alive and unread, until it has waited for the ticket. A ticket
    has ``nbytes``; the ``queue`` that it runs in, and its ``order`` there; and the stream of
    ``compute`` that was current when it was queued. See [Note: Stream order].
    """

    name: str
    needs_pinned_memory: bool

    @property
    def host_released(self) -> HostReleased | None:
        """Called for host bytes that are given back; None: the transport need not know."""
        ...

    def handles(self, device: torch.device) -> bool:
        """Say whether tensors on *device* can be moved by this transport."""
        ...

    def offload(self, src: torch.Tensor, dst: torch.Tensor, **options: Unpack[CopyOptions]) -> Any:
        """Queue the copy of *src*, on the device, to *dst*, on the host; return its ticket."""
        ...

    def reload(self, src: torch.Tensor, dst: torch.Tensor, **options: Unpack[CopyOptions]) -> Any:
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

    def retire_all(self) -> None:
        """Order the current stream of each device behind all copies that are queued.

        For when an interrupt came as a copy was queued, so that no one has its ticket.
        """
        ...

    def await_on_host(self, ticket: Any) -> None:
        """Stop the calling thread, any thread, until the copy has finished.

        For who uses the host's bytes without a stream: a disk. The engine itself never stops.
        """
        ...

    def is_done(self, ticket: Any) -> bool:
        """Say whether the copy has finished, as far as the host knows, without waiting.

        A host that runs ahead hears False nearly always: see [Note: Window].
        """
        ...

    def collect(self, meter: LinkMeter, times: LinkTimes) -> None:
        """Move what was measured for *times* since the last call into *meter*."""
        ...

    def bandwidth(self) -> Bandwidth:
        """Return the link's speed as far as copies so far tell."""
        ...

    def mark(self, device: torch.device) -> Any:
        """Note where compute on *device* has got to, for :meth:`elapsed_ms`."""
        ...

    def span_of(self, ticket: Any) -> tuple[Any, Any] | None:
        """Return the marks between which a copy ran; None where that is not known."""
        ...

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the time between two marks, both of which were reached."""
        ...


@dataclass(eq=False, slots=True)
class DoneTicket:
    """A copy that had finished when the call returned."""

    nbytes: int
    compute: torch.Stream | None = None
    queue: object = None
    order: int = 0
    start_s: float = 0.0
    end_s: float = 0.0


class BlockingTransport:
    """Copies at once, on the caller's thread and stream: for CPUs, and where streams are missing.

    On a CPU the host stands in for the device: bytes are counted and gradients are right, but no
    memory is saved.
    """

    name = "blocking"
    needs_pinned_memory = False
    host_released: HostReleased | None = None

    def __init__(self) -> None:
        self._own_times = LinkTimes()
        self._counts = CopiedSoFar(defaultdict(int), defaultdict(float))

    def handles(self, device: torch.device) -> bool:
        """Take tensors on any device but ``meta``."""
        return device.type != "meta"

    def offload(
        self, src: torch.Tensor, dst: torch.Tensor, **options: Unpack[CopyOptions]
    ) -> DoneTicket:
        """Copy to the host now."""
        return self._copy("offload", src, dst, options)

    def reload(
        self, src: torch.Tensor, dst: torch.Tensor, **options: Unpack[CopyOptions]
    ) -> DoneTicket:
        """Copy to the device now."""
        return self._copy("reload", src, dst, options)

    def wait(self, ticket: DoneTicket) -> None:
        """Do nothing: the copy is done."""

    def retire(self, ticket: DoneTicket) -> None:
        """Do nothing: the copy is done."""

    def retire_all(self) -> None:
        """Do nothing: all copies are done."""

    def await_on_host(self, ticket: DoneTicket) -> None:
        """Do nothing: the copy is done."""

    def is_done(self, ticket: DoneTicket) -> bool:
        """Return True."""
        return True

    def collect(self, meter: LinkMeter, times: LinkTimes) -> None:
        """Report the copies' time; compute stood still meanwhile, so all of it is stall."""
        times.move_to(meter)

    def bandwidth(self) -> Bandwidth:
        """Return bytes over time of all copies so far."""
        return self._counts.bandwidth()

    def mark(self, device: torch.device) -> float:
        """Return the time, in s: what was called before has run."""
        return time.perf_counter()

    def span_of(self, ticket: DoneTicket) -> tuple[float, float] | None:
        """Return when the copy ran."""
        return ticket.start_s, ticket.end_s

    def elapsed_ms(self, start: float, end: float) -> float:
        """Return the time between two marks."""
        return (end - start) * 1e3

    def _copy(
        self, direction: str, src: torch.Tensor, dst: torch.Tensor, options: CopyOptions
    ) -> DoneTicket:
        compute = current_stream((src if direction == "offload" else dst).device)
        start_s = time.perf_counter()
        dst.copy_(src)
        end_s = time.perf_counter()
        elapsed_ms = (end_s - start_s) * 1e3
        nbytes = src.nbytes
        times = options.get("times") or self._own_times
        times.transfer_ms += elapsed_ms
        if direction == "reload":
            times.stall_backward_ms += elapsed_ms
        else:
            times.stall_forward_ms += elapsed_ms
        self._counts.nbytes[direction] += nbytes
        self._counts.elapsed_ms[direction] += elapsed_ms
        return DoneTicket(nbytes, compute, start_s=start_s, end_s=end_s)
