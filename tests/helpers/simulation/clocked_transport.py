"""Copies that take the time that a link would need, for tensors that hold nothing."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hf_pyao.engine.transfer.graph_task import is_in_backward
from hf_pyao.engine.transfer.transport import (
    Bandwidth,
    BlockingTransport,
    CopyOptions,
    DoneTicket,
    LinkMeter,
    LinkTimes,
)
from hf_pyao.plan.hardware.host_model import FAR_AHEAD, HostModel
from hf_pyao.plan.hardware.speeds import LinkModel
from tests.helpers.simulation.virtual_link import Booking, VirtualLink


@dataclass(eq=False)
class ClockedTicket(DoneTicket):
    """A copy on the virtual link."""

    booking: Booking | None = None
    times: LinkTimes | None = None


class ClockedTransport(BlockingTransport):
    """Copies whose times are a virtual link's; bytes are copied at once.

    With :class:`~tests.helpers.simulation.device.SimulatedDevice` a step on fake tensors has the
    time and the peak of given hardware. When bytes are valid is what
    :class:`~tests.helpers.simulation.transport.SimulatedTransport` watches, on real tensors.

    Args:
        link: speeds.
        copy_streams: 2 has a queue for each direction, 1 a single one.
        host: how far the host runs ahead of the device.
    """

    name = "clocked"

    def __init__(
        self, link: LinkModel, *, copy_streams: int = 2, host: HostModel = FAR_AHEAD
    ) -> None:
        super().__init__()
        self.link = VirtualLink(link, copy_streams, host)
        self._orders = itertools.count()

    def wait(self, ticket: DoneTicket) -> None:
        """Let the virtual compute wait for the copy."""
        assert isinstance(ticket, ClockedTicket)
        assert ticket.times is not None
        stall_ms = self.link.wait(ticket.booking)
        ticket.times.add_stall(stall_ms, in_backward=is_in_backward())

    def is_done(self, ticket: DoneTicket) -> bool:
        """Say whether the host knows that the copy has ended on the virtual clock."""
        assert isinstance(ticket, ClockedTicket)
        return self.link.is_done(ticket.booking)

    def collect(self, meter: LinkMeter, times: LinkTimes) -> None:
        """Move virtual times into *meter*."""
        times.move_to(meter)

    def bandwidth(self) -> Bandwidth:
        """Return the link's speeds."""
        return Bandwidth(self.link.model.d2h_gib_per_s, self.link.model.h2d_gib_per_s)

    def mark(self, device: torch.device) -> float:
        """Return where the virtual compute lane has got to, in ms."""
        return self.link.compute_ms

    def span_of(self, ticket: DoneTicket) -> tuple[float, float] | None:
        """Return when the copy ran on the virtual link; None until it ran."""
        assert isinstance(ticket, ClockedTicket)
        booking = ticket.booking
        if booking is None or booking.start_ms is None or booking.end_ms is None:
            return None
        return booking.start_ms, booking.end_ms

    def elapsed_ms(self, start: float, end: float) -> float:
        """Return the time between two marks."""
        return end - start

    def _copy(
        self, direction: str, src: torch.Tensor, dst: torch.Tensor, options: CopyOptions
    ) -> ClockedTicket:
        after, times = options.get("after", ()), options.get("times")
        with _disable_current_modes():  # no operation of the model's
            dst.copy_(src)
        needs: list[object] = [need.booking for need in after if isinstance(need, ClockedTicket)]
        booking = self.link.book(direction, src.nbytes, needs, str(options.get("label", "")))
        times = self._own_times if times is None else times
        times.transfer_ms += self.link.model.copy_ms(direction, src.nbytes)
        return ClockedTicket(
            src.nbytes, queue=direction, order=next(self._orders), booking=booking, times=times
        )
