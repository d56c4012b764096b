"""How much may be in flight: the forward side (copies to the host) and the backward side (reloads).

PyAO synchronises compute and copies at the end of every layer (PyAO paper, section 4.2), which
bounds memory but stops compute at each layer. A window in bytes bounds memory without that: the
oldest copies are waited for only when more than the window is on its way. The rules are in
[Note: Window] in ``transport``; ``planning.windows`` has them as arithmetic.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from hf_pyao.transfer.compute_streams import ComputeStreams, Home
from hf_pyao.transfer.moved_bytes import HOST, OFFLOADING, MovedBytes
from hf_pyao.transfer.transport import Transport


class Leaving(NamedTuple):
    """A device copy that waits to leave."""

    moved: weakref.ref[MovedBytes]
    ticket: Any
    payload: tuple[torch.Tensor, ...]
    nbytes: int


class OffloadWindow:
    """Device copies that wait to leave, oldest first.

    It owns the payloads: a device copy is let go only once compute is ordered behind the copy that
    reads it, or the copy is known to be done. See [Note: Stream order] and [Note: Window] in
    ``transport``.
    """

    def __init__(
        self, transport: Transport, limit_bytes: int | None, streams: ComputeStreams
    ) -> None:
        """Bound the queue to *limit_bytes*; None: until the end of the layer."""
        self.limit_bytes = limit_bytes
        self.waiting_bytes = 0
        self._transport = transport
        self._streams = streams
        self._queue: OrderedDict[int, Leaving] = OrderedDict()
        """By the id of the weak reference, oldest first."""
        self._over: deque[weakref.ref[MovedBytes]] = deque()
        """References on bytes that no one can ask for any more, in the order of their end."""
        self._fruitless: object = None
        """The aim for which no entry was found that is needed later than a reload."""
        self._lock = threading.RLock()  # forwards may run on several threads

    def set_limit(self, limit_bytes: int) -> None:
        """Bound what waits to *limit_bytes*, from the next copy on."""
        self.limit_bytes = limit_bytes

    def add(self, moved: MovedBytes) -> None:
        """Queue the payload of *moved*, whose offload was just issued."""
        ticket = moved.offload_ticket
        limit_bytes = self.limit_bytes
        if (
            limit_bytes is not None
            and not self._queue
            and not self._streams.are_several
            and self._transport.is_done(ticket)
        ):
            moved.source_has_left()
            return
        nbytes = moved.device_bytes
        with self._lock:
            ref = weakref.ref(moved, self._over.append)  # on any thread, inside any other call
            self._queue[id(ref)] = Leaving(ref, ticket, moved.payload, nbytes)
            self.waiting_bytes += nbytes
            self._fruitless = None
            if limit_bytes is None:
                return
            self.release_done()
            while self.waiting_bytes > limit_bytes:
                key, oldest = self._oldest()
                self._transport.wait(oldest.ticket)
                self._release(key)

    def let_nothing_wait(self) -> None:
        """Have compute wait for each copy that is queued from now on."""
        self.limit_bytes = 0

    def release_done(self) -> None:
        """Let go of what the host knows to have left.

        This only lowers memory where the host does not run ahead of the device.
        """
        if not self._queue and not self._streams.has_lingering:
            return
        with self._lock:
            while self._queue:
                key, oldest = self._oldest()
                if not self._transport.is_done(oldest.ticket):
                    break
                self._release(key)
            self._streams.release_lingering()

    def make_room(self, nbytes: int, aim: object) -> int:
        """Order compute behind as few copies as free *nbytes*, and let their payloads go.

        Payloads that no one can ask for any more go first, then those that backward needs later
        than what the room is for, oldest first. What backward reads in place before that stays.

        Args:
            nbytes: bytes to free.
            aim: :attr:`ReloadWindow.aim` of the window that asks: it has marked what it needs
                sooner.

        Returns:
            Bytes that were freed: fewer than *nbytes* if the rest is needed sooner.
        """
        with self._lock:
            meant: list[int] = []
            freed_bytes = 0
            while freed_bytes < nbytes and self._over:
                key = id(self._over.popleft())
                if key in self._queue:
                    meant.append(key)
                    freed_bytes += self._queue[key].nbytes
            if freed_bytes < nbytes and self._fruitless is not aim:
                for key, leaving in self._queue.items():
                    moved = leaving.moved()
                    if moved is not None and moved.aim is not aim:
                        meant.append(key)
                        freed_bytes += leaving.nbytes
                        if freed_bytes >= nbytes:
                            break
                else:
                    self._fruitless = aim
            self._wait_for([self._queue[key] for key in meant])
            for key in meant:
                self._release(key)
            return freed_bytes

    def layer_end(self) -> None:
        """Meet the copies at the end of a layer, if that is the rule; else see what has left."""
        if self.limit_bytes is None:
            self.drain()
        else:
            self.release_done()

    def drain(self, is_meant: Callable[[MovedBytes], bool] | None = None) -> None:
        """Order compute behind what waits, and let it go.

        *is_meant* says what is to go; what no one can ask for any more goes in any case. None: all
        of it goes.
        """
        with self._lock:
            meant = [
                key
                for key, leaving in self._queue.items()
                if is_meant is None or (moved := leaving.moved()) is None or is_meant(moved)
            ]
            self._wait_for([self._queue[key] for key in meant])
            for key in meant:
                self._release(key)
            # An interrupt may have come between the queue and the count.
            self.waiting_bytes = sum(leaving.nbytes for leaving in self._queue.values())
            self._streams.release_lingering()

    def _oldest(self) -> tuple[int, Leaving]:
        key = next(iter(self._queue))
        return key, self._queue[key]

    def _wait_for(self, leaving: Sequence[Leaving]) -> None:
        # Copies of one queue run in order: for one compute stream the newest stands for all.
        newest: dict[tuple[int, torch.Stream | None], Any] = {}
        for each in leaving:
            ticket = each.ticket
            key = (id(ticket.queue), ticket.compute)
            if key not in newest or newest[key].order < ticket.order:
                newest[key] = ticket
        for ticket in newest.values():
            self._transport.wait(ticket)

    def _release(self, key: int) -> None:
        queue, over = self._queue, self._over
        ref, ticket, payload, nbytes = queue.pop(key)
        while over and id(over[0]) not in queue:
            over.popleft()
        self.waiting_bytes -= nbytes
        moved = ref()
        if moved is None or moved.residency is not OFFLOADING:
            if ticket.compute is not None:
                Home(self._streams, ticket.compute).await_everywhere()
            return
        if not self._streams.are_several or moved.codec is not None:
            moved.source_has_left()
            return
        storage = payload[0].untyped_storage()
        del payload
        moved.source_has_left()
        moved.linger(self._streams.let_go(moved.home, storage))


class HasMoved(Protocol):
    """What stands for moved bytes, and dies with them."""

    @property
    def moved(self) -> MovedBytes:
        """The bytes."""
        ...


Group = Sequence[weakref.ref[Any]]
"""Weak references on what stands for moved bytes (:class:`HasMoved`), in the order of packing."""


class ReloadWindow:
    """Moved bytes on their way back, in the order in which backward will ask for them.

    They come in groups, one for each layer call: those of the call whose backward begins, newest
    first, as backward consumes them; then those of the call that backward comes to next; and so
    on, as far as the window reaches. What still waits to leave is read in place and is passed over.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        """Bound what is brought back ahead to *limit_bytes*; None: one group ahead, whole."""
        self.limit_bytes = limit_bytes
        self.aim: object = None
        """Changes with each :meth:`start`. What waits to leave and is needed sooner than the next
        reload carries it (``MovedBytes.aim``)."""
        self._upcoming: deque[weakref.ref[HasMoved]] = deque()
        self._groups: Iterator[Group] = iter(())
        self.ahead_bytes = 0
        self.is_exhausted = True
        """True once there is nothing left to bring back ahead."""

    def set_limit(self, limit_bytes: int) -> None:
        """Bound what is brought back ahead to *limit_bytes*, from the next reload on."""
        self.limit_bytes = limit_bytes

    def start(self, own: Group, others: Iterator[Group]) -> None:
        """Aim at the group *own*, which backward asks for now, and at *others* behind it."""
        self.aim = object()
        self._upcoming = deque(reversed(own))
        self._groups = others
        self.is_exhausted = False
        if self.limit_bytes is None:
            self._extend()

    def next_bytes(self) -> MovedBytes | None:
        """Return what to bring back next; None if nothing is left, or enough is ahead.

        It stays next until its reload is queued.
        """
        upcoming = self._upcoming
        while self.limit_bytes is None or self.ahead_bytes < self.limit_bytes:
            if not upcoming and not (self.limit_bytes is not None and self._extend()):
                self.is_exhausted = True
                return None
            holder = upcoming[0]()
            if holder is not None:
                moved = holder.moved
                if moved.residency is HOST:
                    return moved
                if moved.residency is OFFLOADING:
                    moved.is_aimed_at(self.aim)
            upcoming.popleft()
        return None

    def lacks_bytes(self, waiting_bytes: int) -> int:
        """Return how much more room the next reload needs, where *waiting_bytes* wait to leave.

        A reload may begin while less than the window is in flight; both directions share it.
        """
        if self.limit_bytes is None:
            return 0
        return max(0, self.ahead_bytes + waiting_bytes + 1 - self.limit_bytes)

    def bring_nothing_ahead(self) -> None:
        """Leave it to whoever needs bytes to bring them back, from now on."""
        self.limit_bytes = 0

    def loaded(self, moved: MovedBytes) -> None:
        """Count *moved*, whose reload was just queued, as brought back ahead."""
        self.ahead_bytes += moved.device_bytes

    def consumed(self, moved: MovedBytes) -> None:
        """Count *moved* as used, or dropped: it no longer fills the window."""
        if not moved.is_consumed:
            moved.consumed()
            self.ahead_bytes -= moved.device_bytes

    def reset(self, ahead_bytes: int = 0) -> None:
        """Forget what was coming: this backward is over; *ahead_bytes* are another's."""
        self._upcoming.clear()
        self._groups = iter(())
        self.ahead_bytes = ahead_bytes
        self.is_exhausted = True

    def _extend(self) -> bool:
        for group in self._groups:
            if group:
                self._upcoming.extend(reversed(group))
                return True
        return False
