"""How much may be in flight: the forward side (copies to the host) and the backward side (reloads).

PyAO synchronises compute and copies at the end of every layer (PyAO paper, section 4.2), which
bounds memory but stops compute at each layer. A window in bytes bounds memory without that: the
oldest copies are waited for only when more than the window is on its way.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from hf_pyao.runtime.compute_streams import ComputeStreams, Home, is_held_elsewhere
from hf_pyao.runtime.saved_tensor import HOST, OFFLOADING, SavedStorage
from hf_pyao.runtime.watching import WatchedStorage

if TYPE_CHECKING:
    from hf_pyao.runtime.tape import LayerCall
    from hf_pyao.runtime.transport import Transport


Payload = tuple[torch.Tensor, ...]


class OffloadWindow:
    """Device copies that wait to leave, oldest first.

    It owns the payloads: a device copy is let go only once compute is ordered behind the copy that
    reads it, or the copy is known to be done. See [Note: Stream order].
    """

    def __init__(
        self, transport: Transport, limit_bytes: int | None, streams: ComputeStreams
    ) -> None:
        """Bound the queue to *limit_bytes*; None: until the end of the layer."""
        self._transport = transport
        self._limit_bytes = limit_bytes
        self._streams = streams
        self._queue: deque[tuple[weakref.ref[SavedStorage], Any, Payload, int]] = deque()
        self._lingering: list[weakref.ref[WatchedStorage]] = []
        self._lock = threading.RLock()  # forwards may run on several threads
        self.waiting_bytes = 0

    def add(self, record: SavedStorage, nbytes: int) -> None:
        """Queue the payload of *record* (*nbytes*), whose offload was just issued."""
        ticket = record.offload_ticket
        limit_bytes = self._limit_bytes
        if (
            limit_bytes is not None
            and not self._queue
            and not self._streams.are_several
            and self._transport.is_done(ticket)
        ):
            record.source_has_left()
            return
        with self._lock:
            self._queue.append((weakref.ref(record), ticket, record.payload, nbytes))
            self.waiting_bytes += nbytes
            if limit_bytes is None:
                return
            self.release_done()
            while self.waiting_bytes > limit_bytes:
                self._transport.wait(self._queue[0][1])
                self._release_oldest()

    def release_done(self) -> None:
        """Let go of what is known to have left."""
        with self._lock:
            while self._queue and self._transport.is_done(self._queue[0][1]):
                self._release_oldest()
            if self._lingering:
                self._release_lingering()

    def layer_end(self) -> None:
        """Meet the copies at the end of a layer, if that is the rule; else see what has left."""
        if self._limit_bytes is None:
            self.drain()
        else:
            self.release_done()

    def drain(self) -> None:
        """Order compute behind everything that waits, and let it go."""
        with self._lock:
            if self._streams.are_several:
                for _, ticket, _, _ in self._queue:
                    self._transport.wait(ticket)
            elif self._queue:
                # Copies to the host run in one queue: the newest stands for all before it.
                self._transport.wait(self._queue[-1][1])
            while self._queue:
                self._release_oldest()
            self.waiting_bytes = 0  # an interrupt may have come between the queue and the count
            if self._lingering:
                self._release_lingering()

    def let_go(self, record: WatchedStorage, storage: torch.UntypedStorage) -> None:
        """Let go of *storage*, the source of *record*, which no copy reads.

        Autograd would have held it until backward. With several compute streams it lingers until no
        one else holds it: whoever does may yet queue readers of which the stream that it was
        allocated on knows nothing.
        """
        record.lingering = None
        if not self._streams.are_several:
            return
        if is_held_elsewhere(storage):
            record.lingering = storage
            with self._lock:
                self._lingering.append(weakref.ref(record))
        elif record.home is not None:
            record.home.await_everywhere()

    def forget_streams(self) -> None:
        """Forget which compute streams there were: the next micro-batch may run on others."""
        if not self._lingering:
            self._streams.forget()

    def _release_oldest(self) -> None:
        ref, ticket, payload, nbytes = self._queue.popleft()
        self.waiting_bytes -= nbytes
        record = ref()
        if record is None or record.residency is not OFFLOADING:
            if ticket.compute is not None:
                Home(self._streams, ticket.compute).await_everywhere()
            return
        if not self._streams.are_several or record.codec is not None:
            record.source_has_left()
            return
        storage = payload[0].untyped_storage()
        del payload
        record.source_has_left()
        self.let_go(record, storage)

    def _release_lingering(self) -> None:
        """Let go of the sources that no one else holds any more."""
        refs, self._lingering = self._lingering, []
        for ref in refs:
            record = ref()
            if record is not None and record.lingering is not None:
                self.let_go(record, record.lingering)


class ReloadWindow:
    """Saved storages on their way back, in the order in which backward will ask for them.

    A layer call's own storages come first, newest first, as backward consumes them; then those of
    the call before it in forward order, and so on, as far as the window reaches.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        """Bound what is brought back ahead to *limit_bytes*; None: one layer ahead, whole."""
        self._limit_bytes = limit_bytes
        self._upcoming: deque[weakref.ref[SavedStorage]] = deque()
        self._next_call: LayerCall | None = None
        self.ahead_bytes = 0
        self.is_exhausted = True
        """True once there is nothing left to bring back ahead."""

    def start(self, call: LayerCall) -> None:
        """Aim at *call*, whose backward begins now."""
        self._upcoming = deque(reversed(call.records))
        self._next_call = call.previous
        self.is_exhausted = False
        if self._limit_bytes is None:
            self._extend()

    def next_record(self, waiting_bytes: int = 0) -> SavedStorage | None:
        """Return the next storage to bring back now, or None if the window is full.

        *waiting_bytes* still wait to leave: where backward begins, both share the window.
        """
        while self._limit_bytes is None or self.ahead_bytes + waiting_bytes < self._limit_bytes:
            if not self._upcoming and not (self._limit_bytes is not None and self._extend()):
                self.is_exhausted = True
                return None
            record = self._upcoming.popleft()()
            if record is not None and record.residency is HOST:
                return record
        return None

    def loaded(self, record: SavedStorage) -> None:
        """Count *record* as brought back ahead."""
        record.is_consumed = False
        self.ahead_bytes += record.device_bytes

    def consumed(self, record: SavedStorage) -> None:
        """Count *record* as used, or dropped: it no longer fills the window."""
        if not record.is_consumed:
            record.is_consumed = True
            self.ahead_bytes -= record.device_bytes

    def reset(self) -> None:
        """Forget what was coming: this backward is over."""
        self._upcoming.clear()
        self._next_call = None
        self.ahead_bytes = 0
        self.is_exhausted = True

    def _extend(self) -> bool:
        call = self._next_call
        while call is not None:
            self._next_call = call.previous
            if call.records:
                self._upcoming.extend(reversed(call.records))
                return True
            call = call.previous
        return False
