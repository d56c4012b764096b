"""How much may be in flight: the forward side (copies to the host) and the backward side (reloads).

PyAO synchronises compute and copies at the end of every layer (PyAO paper, section 4.2), which
bounds memory but stops compute at each layer. A window in bytes bounds memory without that: the
oldest copies are waited for only when more than the window is on its way.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
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
    reads it, or the copy is known to be done. See [Note: Stream order].
    """

    def __init__(
        self, transport: Transport, limit_bytes: int | None, streams: ComputeStreams
    ) -> None:
        """Bound the queue to *limit_bytes*; None: until the end of the layer."""
        self.limit_bytes = limit_bytes
        self.waiting_bytes = 0
        self._transport = transport
        self._streams = streams
        self._queue: deque[Leaving] = deque()
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
            self._queue.append(Leaving(weakref.ref(moved), ticket, moved.payload, nbytes))
            self.waiting_bytes += nbytes
            if limit_bytes is None:
                return
            self.release_done()
            while self.waiting_bytes > limit_bytes:
                self._transport.wait(self._queue[0].ticket)
                self._release_oldest()

    def let_nothing_wait(self) -> None:
        """Have compute wait for each copy that is queued from now on."""
        self.limit_bytes = 0

    def release_done(self) -> None:
        """Let go of what is known to have left."""
        if not self._queue and not self._streams.has_lingering:
            return
        with self._lock:
            while self._queue and self._transport.is_done(self._queue[0].ticket):
                self._release_oldest()
            self._streams.release_lingering()

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
                leaving
                for leaving in self._queue
                if is_meant is None or (moved := leaving.moved()) is None or is_meant(moved)
            ]
            self._wait_for(meant)
            if len(meant) == len(self._queue):
                while self._queue:
                    self._release_oldest()
                self.waiting_bytes = 0  # an interrupt may have come between the queue and the count
            else:
                self._release_some(meant)
            self._streams.release_lingering()

    def _wait_for(self, leaving: Sequence[Leaving]) -> None:
        # Copies to the host run in one queue: for one compute stream the newest stands for all
        # before it.
        for each in leaving if self._streams.are_several else leaving[-1:]:
            self._transport.wait(each.ticket)

    def _release_some(self, meant: Sequence[Leaving]) -> None:
        ids = {id(leaving) for leaving in meant}
        staying = [leaving for leaving in self._queue if id(leaving) not in ids]
        self._queue = deque((*meant, *staying))
        for _ in meant:
            self._release_oldest()
        self.waiting_bytes = sum(leaving.nbytes for leaving in self._queue)

    def _release_oldest(self) -> None:
        ref, ticket, payload, nbytes = self._queue.popleft()
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
    on, as far as the window reaches.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        """Bound what is brought back ahead to *limit_bytes*; None: one group ahead, whole."""
        self.limit_bytes = limit_bytes
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
        self._upcoming = deque(reversed(own))
        self._groups = others
        self.is_exhausted = False
        if self.limit_bytes is None:
            self._extend()

    def next_bytes(self, waiting_bytes: int = 0) -> MovedBytes | None:
        """Return what to bring back now, or None if the window is full.

        *waiting_bytes* still wait to leave: where backward begins, both share the window.
        """
        while self.limit_bytes is None or self.ahead_bytes + waiting_bytes < self.limit_bytes:
            if not self._upcoming and not (self.limit_bytes is not None and self._extend()):
                self.is_exhausted = True
                return None
            holder = self._upcoming.popleft()()
            if holder is not None:
                moved = holder.moved
                if moved.residency is HOST:
                    return moved
        return None

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
