"""What the engines of several models may share: one link, one host memory, one window."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_pyao.engine.stores import Store
from hf_pyao.engine.transfer.schedule import Window
from hf_pyao.engine.transfer.tiers import Tier, Tiers
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.errors import ConfigError

if TYPE_CHECKING:
    from hf_pyao.engine.transfer.mover import MovedBytes


class Leaving(NamedTuple):
    """A device copy that waits to leave."""

    moved: weakref.ref[MovedBytes]
    ticket: Any
    payload: tuple[torch.Tensor, ...]
    transport: Transport
    """Whose ticket it is."""


class LinkContext(Window):
    """A transport, host memory, and the window of what waits to leave.

    Engines that share one, such as those of a pipeline's stages on one device, share what there is
    one of: the link, the host memory, and the bound on bytes in flight. What each of them moved,
    and how long its copies took, each counts for itself.

    It owns the payloads that wait to leave: a device copy is let go only once compute is ordered
    behind the copy that reads it, or the copy is known to be done. See [Note: Stream order] and
    [Note: Window] in ``transport``.

    Args:
        transport: copies bytes.
        store: where bytes go that leave the device, mostly a ``HostPool``.
        window_bytes: bound on bytes in flight in each direction; None is the paper's rule, to meet
            at the end of each layer (PyAO paper, section 4.2).
        further_tiers: where bytes go for which *store* has no room, the nearest first.
    """

    def __init__(
        self,
        transport: Transport,
        store: Store,
        window_bytes: int | None,
        further_tiers: Iterable[Tier] = (),
    ) -> None:
        super().__init__(window_bytes)
        self.transport = transport
        self.tiers = Tiers([Tier(store, transport), *further_tiers])
        self.window_bytes = window_bytes
        """What its models were configured with; what holds now is :attr:`limit_bytes`."""
        self._users: weakref.WeakSet[object] = weakref.WeakSet()
        self._leaving: dict[int, Leaving] = {}

    def join(self, user: object) -> None:
        """Note that *user*, an engine's mover, uses this link until it leaves, or is gone."""
        self._users.add(user)

    def leave(self, user: object) -> None:
        """End the use of *user*.

        After the last one the window is as configured again, and no thread of a disk is left.
        """
        self._users.discard(user)
        if not self._users:
            self.set_limit(self.window_bytes)
            for store in self.tiers.stores:
                store.rest()

    @property
    def is_shared(self) -> bool:
        """True while several engines use it."""
        return len(self._users) > 1

    def set_window(self, limit_bytes: int) -> None:
        """Bound the bytes in flight anew, from the next copy on.

        Raises:
            ConfigError: compute and copies meet at each layer's end, which cannot change later; or
                several engines share the link, so that none of them may change the window.
        """
        if self.window_bytes is None:
            raise ConfigError(
                "the window is 'layer'; a number of bytes cannot take its place.", key="shared-link"
            )
        if self.is_shared:
            raise ConfigError(
                f"the window cannot be set to {limit_bytes} bytes: "
                f"{len(self._users)} models share the link. Detach the others first.",
                key="shared-link",
            )
        self.set_limit(limit_bytes)

    # ---- what waits to leave -------------------------------------------------------------------

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

    def is_done(self, item: int) -> bool:
        """Say whether the host knows that the copy of *item* has left."""
        leaving = self._leaving[item]
        return leaving.transport.is_done(leaving.ticket)

    def await_copies(self, items: Sequence[int]) -> None:
        """Order compute behind the copies of *items*."""
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
        if moved is not None and moved.payload:
            moved.source_has_left()
