"""Device copies whose copy to the host is under way: their tensors, and the tickets of the copies.

When each of them is let go is decided by :class:`~hf_pyao.engine.transfer.schedule.Window`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hf_pyao.engine.transfer.moved_bytes import MovedBytes
from hf_pyao.engine.transfer.schedule import Window
from hf_pyao.engine.transfer.transport import Transport


class Leaving(NamedTuple):
    """A device copy that waits to leave."""

    moved: weakref.ref[MovedBytes]
    ticket: Any
    payload: tuple[torch.Tensor, ...]
    transport: Transport
    """Whose ticket it is."""


class OffloadWindow(Window):
    """Holds device copies until compute is ordered behind the copies that read them.

    It owns the payloads: a device copy is let go only once compute is ordered behind the copy that
    reads it, or the copy is known to be done. See [Note: Stream order] and [Note: Window] in
    ``transport``.

    Args:
        limit_bytes: see :class:`~hf_pyao.engine.transfer.schedule.Window`.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        super().__init__(limit_bytes)
        self._users: weakref.WeakSet[object] = weakref.WeakSet()
        self._leaving: dict[int, Leaving] = {}

    def join(self, user: object) -> None:
        """Note that *user*, an engine's mover, uses the link until it leaves, or is gone."""
        self._users.add(user)

    def leave(self, user: object) -> None:
        """End the use of *user*."""
        self._users.discard(user)

    @property
    def num_users(self) -> int:
        """Engines that use the link."""
        return len(self._users)

    @property
    def is_shared(self) -> bool:
        """True while several engines use the link."""
        return self.num_users > 1

    def add(self, moved: MovedBytes) -> None:
        """Hold the payload of *moved*, whose offload was just issued."""
        ticket = moved.offload_ticket
        transport = moved.transport
        if self.limit_bytes is not None and not self.waiting and transport.is_done(ticket):
            moved.source_has_left()
            return
        # First: an interrupt may come, and `drain` finds what is held here.
        self._leaving[moved.item] = Leaving(weakref.ref(moved), ticket, moved.payload, transport)
        self.note_offload(moved.item, moved.device_bytes)

    def layer_end(self) -> None:
        """Meet the copies at the end of a layer, if that is the rule; else see what has left."""
        if self.waiting:
            super().layer_end()

    def release_done(self) -> None:
        """Let go of what the host knows to have left."""
        if self.waiting:
            super().release_done()

    def drain(self, is_meant: Callable[[MovedBytes], bool] | None = None) -> None:
        """Order compute behind what waits, and let it go.

        Args:
            is_meant: says what is to go; what no one can ask for any more goes in any case. None:
                all of it goes.
        """
        with self._lock:
            self.release(
                [
                    item
                    for item, leaving in list(self._leaving.items())
                    if is_meant is None or (moved := leaving.moved()) is None or is_meant(moved)
                ]
            )
            self.recount()

    # ---- what the schedule decides -------------------------------------------------------------

    def is_done(self, item: int) -> bool:
        """Say whether the host knows that the copy of *item* has left."""
        leaving = self._leaving[item]
        return leaving.transport.is_done(leaving.ticket)

    def await_copies(self, items: Sequence[int]) -> None:
        """Order compute behind the copies of *items*."""
        if len(items) == 1:
            leaving = self._leaving[items[0]]
            leaving.transport.wait(leaving.ticket)
            return
        # Copies of one queue run in order: for one compute stream the newest stands for all.
        newest: dict[tuple[int, torch.Stream | None], Leaving] = {}
        for item in items:
            leaving = self._leaving[item]
            ticket = leaving.ticket
            key = (id(ticket.queue), ticket.compute)
            if key not in newest or newest[key].ticket.order < ticket.order:
                newest[key] = leaving
        for leaving in newest.values():
            leaving.transport.wait(leaving.ticket)

    def let_go(self, item: int) -> None:
        """Let the payload of *item* go."""
        moved = self._leaving.pop(item).moved()
        if moved is not None and moved.is_near:
            moved.source_has_left()
