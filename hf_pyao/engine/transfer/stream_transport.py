"""Copies on streams beside compute. See [Note: Stream order] in ``transport``."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_pyao.engine.transfer.compute_streams import current_stream
from hf_pyao.engine.transfer.graph_task import is_in_backward
from hf_pyao.engine.transfer.transport import (
    Bandwidth,
    BlockingTransport,
    CopiedSoFar,
    CopyOptions,
    HostReleased,
    LinkMeter,
    LinkTimes,
    Transport,
)
from hf_pyao.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(eq=False, slots=True)
class StreamTicket:
    """A copy queued on a stream, between two events. They are used again once no one holds this."""

    kind: str
    nbytes: int
    times: LinkTimes
    """Whose time it is."""
    start: torch.Event
    end: torch.Event
    spare: list[torch.Event]
    """Events of the device that may be recorded anew."""
    queue: torch.Stream
    order: int
    device: torch.device
    compute: torch.Stream
    """The stream that was current when the copy was queued."""

    def __del__(self) -> None:
        """Give the events back. The transport holds this until both have come."""
        self.spare.extend((self.start, self.end))


@dataclass(eq=False, slots=True)
class _Wait:
    """Compute's wait for a copy, if the copy ends later than compute comes to *start*."""

    ticket: StreamTicket
    start: torch.Event
    in_backward: bool

    def __del__(self) -> None:
        self.ticket.spare.append(self.start)


@dataclass(eq=False, slots=True)
class _Streams:
    d2h: torch.Stream
    h2d: torch.Stream


class StreamTransport:
    """Copies on streams of their own, beside compute: any device that ``torch.accelerator`` knows.

    Args:
        copy_streams: 2 gives each direction a stream of its own; 1 queues both on one (PyAO paper,
            section 5.2); 0 copies on the compute stream, without overlap, for comparison (the
            single-stream row of the paper's Table 3).
    """

    name = "stream"
    needs_pinned_memory = True
    host_released: HostReleased | None = None

    def __init__(self, copy_streams: int = 2) -> None:
        if copy_streams not in (0, 1, 2):
            raise ConfigError(
                f"copy_streams is {copy_streams!r}; expected 0, 1 or 2.", key="wrong-argument"
            )
        self.copy_streams = copy_streams
        self._streams: dict[torch.device, _Streams] = {}
        self._orders = itertools.count()
        self._timed: deque[StreamTicket | _Wait] = deque()
        """Copies, and waits for them, that were not timed yet, oldest first."""
        self._spare: defaultdict[torch.device, list[torch.Event]] = defaultdict(list)
        self._own_times = LinkTimes()
        self._counts = CopiedSoFar(defaultdict(int), defaultdict(float))

    def handles(self, device: torch.device) -> bool:
        """Take tensors on accelerators."""
        return device.type not in ("cpu", "meta")

    def offload(
        self, src: torch.Tensor, dst: torch.Tensor, **options: Unpack[CopyOptions]
    ) -> StreamTicket:
        """Queue the copy on the device-to-host stream."""
        return self._copy("offload", self._of(src.device).d2h, src.device, src, dst, options)

    def reload(
        self, src: torch.Tensor, dst: torch.Tensor, **options: Unpack[CopyOptions]
    ) -> StreamTicket:
        """Queue the copy on the host-to-device stream."""
        return self._copy("reload", self._of(dst.device).h2d, dst.device, src, dst, options)

    def wait(self, ticket: StreamTicket) -> None:
        """Make the stream that the copy was queued from wait for the copy's event."""
        if ticket.end.query():
            return
        stream = ticket.compute
        start = self._event(ticket.device)
        start.record(stream)
        stream.wait_event(ticket.end)
        self._timed.append(_Wait(ticket, start, is_in_backward()))

    def retire(self, ticket: StreamTicket) -> None:
        """Make the stream that the copy was queued from wait for the copy's event."""
        ticket.compute.wait_event(ticket.end)

    def retire_all(self) -> None:
        """Make the current stream of each device wait for both copy streams."""
        for device, streams in list(self._streams.items()):
            compute = current_stream(device)
            assert compute is not None
            for stream in (streams.d2h, streams.h2d):
                end = torch.Event(device)
                end.record(stream)
                compute.wait_event(end)

    def await_on_host(self, ticket: StreamTicket) -> None:
        """Wait for the copy's event on the calling thread."""
        ticket.end.synchronize()

    def is_done(self, ticket: StreamTicket) -> bool:
        """Ask the event, without waiting."""
        return bool(ticket.end.query())

    def collect(self, meter: LinkMeter, times: LinkTimes) -> None:
        """Read the events of finished copies and waits, up to the first one that still runs.

        To ask an event costs the host more than a microsecond.
        """
        timed = self._timed
        while timed:
            each = timed[0]
            if isinstance(each, _Wait):
                ticket = each.ticket
                if not (each.start.query() and ticket.end.query()):
                    break
                elapsed_ms = each.start.elapsed_time(ticket.end)
                # Below zero: the copy had ended before compute came to the wait.
                ticket.times.add_stall(max(0.0, elapsed_ms), in_backward=each.in_backward)
            else:
                if not each.end.query():
                    break
                elapsed_ms = each.start.elapsed_time(each.end)
                each.times.transfer_ms += elapsed_ms
                self._counts.nbytes[each.kind] += each.nbytes
                self._counts.elapsed_ms[each.kind] += elapsed_ms
            timed.popleft()
        times.move_to(meter)
        if not meter.device_peak_bytes:  # asked once: a meter is collected until all is timed
            peaks = map(torch.accelerator.max_memory_allocated, self._streams)
            meter.device_peak_bytes = max(peaks, default=0)

    def bandwidth(self) -> Bandwidth:
        """Return bytes over time of the copies collected so far."""
        return self._counts.bandwidth()

    def mark(self, device: torch.device) -> torch.Event:
        """Record an event on the current stream of *device*."""
        event = self._event(device)
        event.record(current_stream(device))
        return event

    def span_of(self, ticket: StreamTicket) -> tuple[torch.Event, torch.Event] | None:
        """Return the events around the copy."""
        return ticket.start, ticket.end

    def elapsed_ms(self, start: torch.Event, end: torch.Event) -> float:
        """Return the device's time between two events, both of which must have come."""
        return float(start.elapsed_time(end))

    def _copy(
        self,
        kind: str,
        stream: torch.Stream,
        device: torch.device,
        src: torch.Tensor,
        dst: torch.Tensor,
        options: CopyOptions,
    ) -> StreamTicket:
        compute = current_stream(device)
        assert compute is not None
        spare = self._spare[device]
        start, end = self._event(device), self._event(device)
        ready, times = options.get("behind"), options.get("times")
        if ready is not None:
            stream.wait_event(ready)
        else:
            start.record(compute)
            stream.wait_event(start)  # for what was recorded before it: it is recorded again
        for ticket in options.get("after", ()):
            if ticket.queue is not stream:
                stream.wait_event(ticket.end)  # to ask whether it has come would cost more
        with stream:
            start.record(stream)
            dst.copy_(src, non_blocking=True)
            end.record(stream)
        copied = StreamTicket(
            kind,
            src.nbytes,
            self._own_times if times is None else times,
            start,
            end,
            spare,
            stream,
            next(self._orders),
            device,
            compute,
        )
        self._timed.append(copied)
        return copied

    def _event(self, device: torch.device) -> torch.Event:
        try:
            return self._spare[device].pop()
        except IndexError:
            return torch.Event(device, enable_timing=True)

    def _of(self, device: torch.device) -> _Streams:
        streams = self._streams.get(device)
        if streams is None:
            compute = current_stream(device)
            assert compute is not None
            d2h = torch.Stream(device) if self.copy_streams else compute
            h2d = torch.Stream(device) if self.copy_streams == 2 else d2h
            streams = self._streams[device] = _Streams(d2h, h2d)
        return streams


def transport_for(device: torch.device) -> Transport:
    """Return the transport that suits *device*: streams on an accelerator, else blocking."""
    return BlockingTransport() if device.type in ("cpu", "meta") else StreamTransport()
