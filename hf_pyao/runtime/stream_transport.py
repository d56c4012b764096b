"""Copies on streams beside compute. See [Note: Stream order] in ``transport``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_pyao.errors import ConfigError
from hf_pyao.metrics import MicroBatchStats
from hf_pyao.runtime.compute_streams import current_stream
from hf_pyao.runtime.transport import Bandwidth, BlockingTransport, Transport


@dataclass(eq=False, slots=True)
class StreamTicket:
    """A copy queued on a stream."""

    nbytes: int
    queue: torch.Stream
    order: int
    device: torch.device
    compute: torch.Stream
    """The stream that was current when the copy was queued."""
    end: torch.Event
    """Recorded behind the copy."""


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

    def __init__(self, copy_streams: int = 2) -> None:
        if copy_streams not in (0, 1, 2):
            raise ConfigError(f"copy_streams is {copy_streams!r}; expected 0, 1 or 2.")
        self.copy_streams = copy_streams
        self._streams: dict[torch.device, _Streams] = {}
        self._orders = itertools.count()
        self._timed: list[tuple[str, int, torch.Event, torch.Event]] = []
        self._total_ms = {"offload": 0.0, "reload": 0.0}
        self._total_bytes = {"offload": 0, "reload": 0}

    def handles(self, device: torch.device) -> bool:
        """Take tensors on accelerators."""
        return device.type not in ("cpu", "meta")

    def offload(
        self, src: torch.Tensor, dst: torch.Tensor, *, after: Sequence[Any] = (), label: object = ""
    ) -> StreamTicket:
        """Queue the copy on the device-to-host stream."""
        return self._copy("offload", self._of(src.device).d2h, src.device, src, dst, after)

    def reload(
        self, src: torch.Tensor, dst: torch.Tensor, *, after: Sequence[Any] = (), label: object = ""
    ) -> StreamTicket:
        """Queue the copy on the host-to-device stream."""
        return self._copy("reload", self._of(dst.device).h2d, dst.device, src, dst, after)

    def wait(self, ticket: StreamTicket) -> None:
        """Make the stream that the copy was queued from wait for the copy's event."""
        if ticket.end.query():
            return
        stream = ticket.compute
        before, behind = self._event(ticket.device), self._event(ticket.device)
        before.record(stream)
        stream.wait_event(ticket.end)
        behind.record(stream)
        in_backward = torch._C._current_graph_task_id() != -1
        self._timed.append(("backward" if in_backward else "forward", 0, before, behind))

    def retire(self, ticket: StreamTicket) -> None:
        """Make the stream that the copy was queued from wait for the copy's event."""
        ticket.compute.wait_event(ticket.end)

    def is_done(self, ticket: StreamTicket) -> bool:
        """Ask the event, without waiting."""
        return bool(ticket.end.query())

    def host_released(self, data: torch.Tensor, after: Any) -> None:
        """Do nothing: order is kept by ``after`` at the next offload."""

    def collect(self, stats: MicroBatchStats) -> None:
        """Read the events of finished copies and waits; those still running are left for later."""
        running = []
        for kind, nbytes, start, end in self._timed:
            if not end.query():
                running.append((kind, nbytes, start, end))
                continue
            elapsed_ms = start.elapsed_time(end)
            if kind == "forward":
                stats.stall_forward_ms += elapsed_ms
            elif kind == "backward":
                stats.stall_backward_ms += elapsed_ms
            else:
                stats.transfer_ms += elapsed_ms
                self._total_ms[kind] += elapsed_ms
                self._total_bytes[kind] += nbytes
        self._timed = running
        for device in self._streams:
            peak_bytes = torch.accelerator.max_memory_allocated(device)
            stats.device_peak_bytes = max(stats.device_peak_bytes, peak_bytes)

    def bandwidth(self) -> Bandwidth:
        """Return bytes over time of the copies collected so far."""
        return Bandwidth(*(self._speed(direction) for direction in ("offload", "reload")))

    def _speed(self, direction: str) -> float | None:
        elapsed_ms = self._total_ms[direction]
        return self._total_bytes[direction] / 2**30 / (elapsed_ms / 1e3) if elapsed_ms else None

    def _copy(
        self,
        kind: str,
        stream: torch.Stream,
        device: torch.device,
        src: torch.Tensor,
        dst: torch.Tensor,
        after: Sequence[StreamTicket],
    ) -> StreamTicket:
        compute = current_stream(device)
        assert compute is not None
        ready = torch.Event(device)
        ready.record(compute)
        stream.wait_event(ready)
        for ticket in after:
            if ticket.queue is not stream and not ticket.end.query():
                stream.wait_event(ticket.end)
        start, end = self._event(device), self._event(device)
        with stream:
            start.record(stream)
            dst.copy_(src, non_blocking=True)
            end.record(stream)
        nbytes = src.nbytes
        self._timed.append((kind, nbytes, start, end))
        return StreamTicket(nbytes, stream, next(self._orders), device, compute, end)

    def _event(self, device: torch.device) -> torch.Event:
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


TRANSPORTS: dict[str, Callable[[int], Transport]] = {
    "stream": StreamTransport,
    "blocking": lambda copy_streams: BlockingTransport(),
}


def transport_for(device: torch.device, copy_streams: int = 2) -> Transport:
    """Return the transport that suits *device*: streams on an accelerator, else blocking."""
    name = "blocking" if device.type in ("cpu", "meta") else "stream"
    return TRANSPORTS[name](copy_streams)
