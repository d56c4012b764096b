"""A simulated accelerator link: a GPU's dangers, made certain instead of rare.

On a GPU a missing wait shows up once in a thousand steps. :class:`SimulatedTransport` runs on CPU
tensors and behaves like the worst pair of streams that could exist: a copy completes as late as the
waits allow, or at any earlier moment, as a seeded schedule draws. Until then its target holds
poison, and its source is watched. The engine cannot tell it from a real transport, so a test that
passes under many seeds shows that every wait is there.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import cast

import torch
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import _disable_current_modes

from hf_pyao.engine.transfer.graph_task import is_in_backward
from hf_pyao.engine.transfer.layout import bytes_of
from hf_pyao.engine.transfer.transport import Bandwidth, LinkMeter, LinkTimes
from hf_pyao.plan.hardware.host_model import FAR_AHEAD, HostModel
from hf_pyao.plan.hardware.speeds import LinkModel
from tests.helpers.simulation.virtual_link import Booking, VirtualLink

POISON_BYTE = 0xFF
"""NaN in every floating dtype, -1 in signed integers, and no valid bool."""


def _outside_of_modes() -> AbstractContextManager[object]:
    """Return a context in which the copies' own operations are seen by no dispatch mode."""
    return _disable_current_modes() if _len_torch_dispatch_stack() else _NO_MODES


_NO_MODES = nullcontext()


class SimulatedRaceError(RuntimeError):
    """A copy read or wrote memory that was no longer its own."""


@dataclass(eq=False)
class SimulatedTicket:
    """A copy in one of the simulated queues."""

    direction: str
    """``"offload"``, ``"reload"``, or ``"poison"`` for a released host buffer."""
    nbytes: int
    queue: object
    order: int
    label: object
    host: torch.Tensor
    """The host bytes. They belong to a pool, which keeps their memory."""
    device_key: int
    """Weak reference to the device storage; 0 for ``"poison"``."""
    device_offset: int
    before: torch.Tensor | None
    """What an offload's source held when it was queued."""
    needs: tuple[SimulatedTicket, ...]
    times: LinkTimes = field(default_factory=LinkTimes)
    """Whose time it is."""
    is_done: bool = False
    booking: object = None
    """The copy's place on the virtual link, if there is one."""
    compute: None = None
    """Tensors of a CPU know no streams."""

    def __del__(self) -> None:
        """Let go of the weak reference to the device storage."""
        if self.device_key and not sys.is_finalizing():  # torch may be gone by then
            torch.UntypedStorage._free_weak_ref(self.device_key)  # type: ignore[no-untyped-call]


@dataclass
class _Queue:
    name: str
    pending: deque[SimulatedTicket] = field(default_factory=deque)


class SimulatedTransport:
    """Copies between CPU tensors that stand for a device, and the host, under a hostile schedule.

    Args:
        seed: draws the schedule. The same seed and program give the same schedule.
        copy_streams: 2 has a queue for each direction, 1 a single one; 0 copies at once, as on
            the compute stream.
        link: speeds of the virtual link; times are then in the metrics, on a virtual clock that
            :class:`~tests.helpers.simulation.device.SimulatedDevice` advances.
        host: how far the host runs ahead of that clock.

    Raises:
        SimulatedRaceError: from any call, when a copy finds its source released or changed, or its
            target released. The message names both sides. ``violations`` keeps them all.
    """

    name = "simulated"
    needs_pinned_memory = False

    def __init__(
        self,
        seed: int = 0,
        *,
        copy_streams: int = 2,
        link: LinkModel | None = None,
        host: HostModel = FAR_AHEAD,
    ) -> None:
        self.seed = seed
        self.violations: list[str] = []
        self.num_copies = {"offload": 0, "reload": 0}
        self.link = VirtualLink(link, copy_streams, host) if link is not None else None
        self._random = random.Random(seed)
        # How eager this schedule is: some complete nothing before they must, some nearly all.
        self._eagerness = self._random.choice((0.0, 0.05, 0.3, 0.7))
        self._orders = itertools.count()
        self._copies_at_once = copy_streams == 0
        d2h = _Queue("device-to-host")
        self._queues = {
            "offload": d2h,
            "reload": _Queue("host-to-device") if copy_streams == 2 else d2h,
        }
        self._own_times = LinkTimes()

    # ---- the Transport protocol ----------------------------------------------------------------

    def handles(self, device: torch.device) -> bool:
        """Take CPU tensors; they stand for the device's."""
        return device.type == "cpu"

    def offload(
        self,
        src: torch.Tensor,
        dst: torch.Tensor,
        *,
        after: Sequence[SimulatedTicket] = (),
        label: object = "",
        times: LinkTimes | None = None,
    ) -> SimulatedTicket:
        """Queue a copy to the host. *dst* holds poison until it is done; *src* is watched."""
        with _outside_of_modes():
            source, target = bytes_of(src), bytes_of(dst)
            before = source.clone()
        ticket = self._queue("offload", source, target, after, label, times)
        ticket.before = before
        return self._issued(ticket)

    def reload(
        self,
        src: torch.Tensor,
        dst: torch.Tensor,
        *,
        after: Sequence[SimulatedTicket] = (),
        label: object = "",
        times: LinkTimes | None = None,
        behind: float | None = None,
    ) -> SimulatedTicket:
        """Queue a copy to the device. *dst* holds poison until it is done.

        Where one of *after* is a copy to the host that still reads the same memory, *dst* keeps
        what that copy is to read.
        """
        with _outside_of_modes():
            source, target = bytes_of(src), bytes_of(dst)
            memory = cast(int, target.untyped_storage()._weak_ref())
            is_read = any(
                not each.is_done and each.direction == "offload" and each.device_key == memory
                for each in after
            )
            torch.UntypedStorage._free_weak_ref(memory)  # type: ignore[no-untyped-call]
            if not is_read:
                target.fill_(POISON_BYTE)
        ticket = self._queue("reload", target, source, after, label, times)
        return self._issued(ticket)

    def wait(self, ticket: SimulatedTicket) -> None:
        """Complete the copy, and what must come before it; perhaps more, if the schedule says."""
        self._tick()
        self._complete(ticket)
        if self.link is not None and ticket.booking is not None:
            stall_ms = self.link.wait(ticket.booking)
            ticket.times.add_stall(stall_ms, in_backward=is_in_backward())

    def retire(self, ticket: SimulatedTicket) -> None:
        """Complete the copy: its target's memory may be reused from here on."""
        self._complete(ticket)

    def retire_all(self) -> None:
        """Complete all copies: their memory may be reused from here on."""
        self.finish()

    def await_on_host(self, ticket: SimulatedTicket) -> None:
        """Complete the copy. Only the thread that queues copies may call it."""
        self._complete(ticket)

    def is_done(self, ticket: SimulatedTicket) -> bool:
        """Say whether the schedule (or the virtual clock) has let the copy complete."""
        self._tick()
        if self.link is not None and ticket.booking is not None:
            if not self.link.is_done(ticket.booking):
                return False
            self._complete(ticket)
        return ticket.is_done

    def host_released(self, data: torch.Tensor, after: SimulatedTicket | None) -> None:
        """Poison the released bytes, behind the copy that may still read them."""
        queue = self._queues["offload"]
        needs = (after,) if after is not None else ()
        queue.pending.append(
            SimulatedTicket(
                "poison", 0, queue, next(self._orders), "released buffer", data, 0, 0, None, needs
            )
        )

    def collect(self, meter: LinkMeter, times: LinkTimes) -> None:
        """Move virtual times into *meter*; zeros without a link model."""
        times.move_to(meter)

    def bandwidth(self) -> Bandwidth:
        """Return the link model's speeds."""
        if self.link is None:
            return Bandwidth(None, None)
        return Bandwidth(self.link.model.d2h_gib_per_s, self.link.model.h2d_gib_per_s)

    def mark(self, device: torch.device) -> float:
        """Return where the virtual compute lane has got to, in ms; without a link, the time."""
        return time.perf_counter() * 1e3 if self.link is None else self.link.compute_ms

    def span_of(self, ticket: SimulatedTicket) -> tuple[float, float] | None:
        """Return when the copy ran on the virtual link; None without one, or until it ran."""
        booking = ticket.booking
        if not isinstance(booking, Booking) or booking.start_ms is None or booking.end_ms is None:
            return None
        return booking.start_ms, booking.end_ms

    def elapsed_ms(self, start: float, end: float) -> float:
        """Return the time between two marks."""
        return end - start

    # ---- what tests ask for --------------------------------------------------------------------

    def finish(self) -> None:
        """Complete everything that is queued, as a device-wide synchronise would."""
        for queue in self._queues.values():
            while queue.pending:
                self._complete(queue.pending[-1])

    # ---- the schedule --------------------------------------------------------------------------

    def _queue(
        self,
        direction: str,
        device: torch.Tensor,
        host: torch.Tensor,
        after: Sequence[SimulatedTicket],
        label: object,
        times: LinkTimes | None,
    ) -> SimulatedTicket:
        queue = self._queues[direction]
        ticket = SimulatedTicket(
            direction,
            host.numel(),
            queue,
            next(self._orders),
            label,
            host,
            cast(int, device.untyped_storage()._weak_ref()),
            int(device.storage_offset()),
            None,
            tuple(after),
            self._own_times if times is None else times,
        )
        if self.link is not None:
            needs = [need.booking for need in after if need.booking is not None]
            ticket.booking = self.link.book(direction, ticket.nbytes, needs, str(label))
            ticket.times.transfer_ms += self.link.model.copy_ms(direction, ticket.nbytes)
        queue.pending.append(ticket)
        self.num_copies[direction] += 1
        return ticket

    def _issued(self, ticket: SimulatedTicket) -> SimulatedTicket:
        if self._copies_at_once:
            self.wait(ticket)
        self._tick()
        return ticket

    def _tick(self) -> None:
        """Let some copies complete that could have by now."""
        while self._random.random() < self._eagerness:
            ready = [q.pending[0] for q in self._distinct_queues() if q.pending]
            ready = [t for t in ready if all(need.is_done for need in t.needs)]
            if not ready:
                return
            self._complete(self._random.choice(ready))

    def _distinct_queues(self) -> list[_Queue]:
        return list({id(queue): queue for queue in self._queues.values()}.values())

    def _complete(self, ticket: SimulatedTicket) -> None:
        """Complete a copy with all that its queue and its needs put before it."""
        while not ticket.is_done:
            queue = ticket.queue
            assert isinstance(queue, _Queue)
            first = queue.pending[0]
            for need in first.needs:
                self._complete(need)
            if first.is_done:
                continue
            queue.pending.popleft()
            first.is_done = True
            with _outside_of_modes():
                self._perform(first)
            first.before = None

    def _perform(self, ticket: SimulatedTicket) -> None:
        if ticket.direction == "poison":
            ticket.host.fill_(POISON_BYTE)
            return
        device = self._device_bytes(ticket)
        if ticket.direction == "reload":
            device.copy_(ticket.host)
            return
        if ticket.before is not None and not torch.equal(device, ticket.before):
            raise self._violation(
                f"the source of the copy to the host of {ticket.label} was changed before the copy "
                "had read it: compute wrote to it without waiting for the copy."
            )
        ticket.host.copy_(device)

    def _device_bytes(self, ticket: SimulatedTicket) -> torch.Tensor:
        storage = None
        if not torch.UntypedStorage._expired(ticket.device_key):
            storage = torch.UntypedStorage._new_with_weak_ptr(ticket.device_key)
        if storage is None:
            side, deed = (
                ("source", "read") if ticket.direction == "offload" else ("target", "write")
            )
            raise self._violation(
                f"the {side} of the {ticket.direction} of {ticket.label} was released before the "
                f"copy could {deed} it: its memory may be another tensor's by now."
            )
        flat = torch.empty(0, dtype=torch.uint8)
        return flat.set_(storage, ticket.device_offset, (ticket.nbytes,), (1,))

    def _violation(self, message: str) -> SimulatedRaceError:
        self.violations.append(message)
        return SimulatedRaceError(message)
