"""The schedule of copies: what may be in flight, what is let go when, and what comes back next.

It is arithmetic on integers: items have an id and a size, and nothing here knows what they are.
Subclasses carry out what it decides: those of the engine with tensors and tickets (``link``,
``mover``), those of the predictor with times and sizes (``hf_pyao.plan``). Hence both take the
same decisions. The rules are in [Note: Window] in ``transport``.

- A :class:`Window` belongs to a link. It holds the bound on bytes in flight, and what waits to
  leave the device. All engines that share the link share it.
- A :class:`Schedule` belongs to one engine. It holds the order in which backward asks for items,
  and what was brought back and is not used yet.

Of the world a window asks whether a copy is done, and a schedule whether an item is on the host.
"""

from __future__ import annotations

import abc
import itertools
import threading
from collections import deque
from collections.abc import Collection, Container, Iterator, Sequence

NO_ITEMS: frozenset[int] = frozenset()


class Window(abc.ABC):
    """The bound on bytes in flight on one link, and what waits to leave the device.

    An item waits from :meth:`note_offload` until compute is ordered behind its copy to the host, or
    that copy is known to be done.

    Args:
        limit_bytes: most bytes that wait to leave, and most that are brought back ahead. None:
            compute and copies meet at the end of each layer (PyAO paper, section 4.2).
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.waiting: dict[int, int] = {}
        """Bytes of the items that wait to leave, oldest first."""
        self.waiting_bytes = 0
        self.new_items = itertools.count()
        """Ids for what moves over this link, each of them once."""
        self._lock = threading.RLock()  # models on several threads may share a link
        self._over: deque[int] = deque()
        """Items that no one can ask for any more, in the order of their end."""
        self._searched: Container[int] | None = None
        """The items needed sooner for which no item was found that is needed later."""

    # ---- carried out by the subclass -----------------------------------------------------------

    @abc.abstractmethod
    def is_done(self, item: int) -> bool:
        """Say whether the host knows that the copy of *item* to the host is done."""

    @abc.abstractmethod
    def await_copies(self, items: Sequence[int]) -> None:
        """Order compute behind the copies of *items* to the host."""

    @abc.abstractmethod
    def let_go(self, item: int) -> None:
        """Let the device copy of *item* go: from now on it is on the host alone."""

    # ---- what happens --------------------------------------------------------------------------

    def set_limit(self, limit_bytes: int | None) -> None:
        """Bound what is in flight to *limit_bytes*, from the next copy on."""
        self.limit_bytes = limit_bytes

    def note_offload(self, item: int, nbytes: int) -> None:
        """Let *item* wait to leave: its copy to the host was just queued."""
        with self._lock:
            self.waiting[item] = nbytes
            self.waiting_bytes += nbytes
            self._searched = None
            limit_bytes = self.limit_bytes
            if limit_bytes is None:
                return
            self.release_done()
            while self.waiting_bytes > limit_bytes:
                oldest = next(iter(self.waiting))
                self.await_copies((oldest,))
                self._release(oldest)

    def end(self, item: int) -> None:
        """Note that no one can ask for *item* any more. It may be called in a destructor."""
        if item in self.waiting:
            self._over.append(item)

    def release_done(self) -> None:
        """Release what the host knows to have left, oldest first.

        This only lowers memory where the host does not run ahead of the device.
        """
        waiting, is_done = self.waiting, self.is_done
        if not waiting:
            return
        with self._lock:
            while waiting:
                oldest = next(iter(waiting))
                if not is_done(oldest):
                    return
                self._release(oldest)

    def layer_end(self) -> None:
        """Meet the copies at the end of a layer, if that is the rule; else see what has left."""
        if not self.waiting:
            return
        if self.limit_bytes is None:
            with self._lock:  # another thread may release some of them
                self.release(list(self.waiting))
        else:
            self.release_done()

    def make_room(self, nbytes: int, sooner: Container[int]) -> bool:
        """Release as few items as free *nbytes*; say whether that much was freed.

        Items that no one can ask for any more go first, then those that are needed later than what
        the room is for, oldest first.

        Args:
            nbytes: bytes to free.
            sooner: items that are needed before what the room is for: they stay.
        """
        with self._lock:
            meant: dict[int, None] = {}
            while nbytes > 0 and self._over:
                item = self._over.popleft()
                if item in self.waiting:
                    meant[item] = None
                    nbytes -= self.waiting[item]
            if nbytes > 0 and self._searched is not sooner:
                for item, item_bytes in self.waiting.items():
                    if item not in sooner and item not in meant:
                        meant[item] = None
                        nbytes -= item_bytes
                        if nbytes <= 0:
                            break
                else:
                    self._searched = sooner
            if meant:
                self.release(list(meant))
            return nbytes <= 0

    def release(self, items: Sequence[int]) -> None:
        """Order compute behind the copies of *items* to the host, and let them go."""
        with self._lock:
            self.await_copies(items)
            for item in items:
                self._release(item)

    def recount(self) -> None:
        """Count again what waits: an interrupt may have come between the items and the count."""
        with self._lock:
            self.waiting_bytes = sum(self.waiting.values())

    def _release(self, item: int) -> None:
        waiting, over = self.waiting, self._over
        self.waiting_bytes -= waiting.pop(item, 0)
        while over and over[0] not in waiting:
            over.popleft()
        self.let_go(item)


class Schedule(abc.ABC):
    """What one engine brings back ahead of its use, in the order that it is given.

    Items come in groups, one for each layer call: those of the call whose backward begins, then
    those of the call that backward comes to next, and so on, as far as the window reaches. What
    still waits to leave is read in place and is passed over.

    Args:
        window: of the link; may be shared.

    Bytes that were brought back ahead count for this engine alone. Not thread-safe.
    """

    def __init__(self, window: Window) -> None:
        self.ahead: dict[int, int] = {}
        """Bytes of the items that were brought back and are not used yet."""
        self.ahead_bytes = 0
        self.is_exhausted = True
        """True once there is nothing left to bring back ahead."""
        self.window = window
        self._upcoming: deque[int] = deque()
        self._groups: Iterator[Sequence[int]] = iter(())
        self._sooner: set[int] = set()
        """Items that wait to leave and are needed sooner than the next reload."""

    # ---- carried out by the subclass -----------------------------------------------------------

    @abc.abstractmethod
    def is_away(self, item: int) -> bool:
        """Say whether *item* is on the host alone, and can still be asked for."""

    @abc.abstractmethod
    def bring_back(self, item: int) -> None:
        """Queue the copy of *item* to the device, and call :meth:`note_reload`."""

    @abc.abstractmethod
    def await_reload(self, item: int) -> None:
        """Order compute behind the copy of *item* to the device, if one is under way."""

    # ---- what happens --------------------------------------------------------------------------

    def start(self, own: Sequence[int], others: Iterator[Sequence[int]]) -> None:
        """Aim at *own*, and at *others* behind it, and bring back what the window has room for.

        Args:
            own: the items of the layer call whose backward begins, in the order in which backward
                asks for them.
            others: those of the calls that follow, in the same order.
        """
        meets = self.window.limit_bytes is None
        if meets:
            for item in reversed(own):  # the newest reload first: it stands for those before
                self.await_reload(item)
        self._sooner = set()  # a new one: the window tells them apart
        self._upcoming = deque(own)
        self._groups = others
        self.is_exhausted = False
        if meets:
            self._extend()
        self.prefetch()

    def prefetch(self) -> None:
        """Bring back ahead what the window has room for.

        An item stays next until its reload is queued.
        """
        window, upcoming = self.window, self._upcoming
        limit_bytes = window.limit_bytes
        while limit_bytes is None or self.ahead_bytes < limit_bytes:
            if not upcoming and (limit_bytes is None or not self._extend()):
                self.is_exhausted = True
                return
            item = upcoming[0]
            if self.is_away(item):
                if limit_bytes is not None:
                    # A reload may begin while less than the window is in flight, both ways.
                    lacking_bytes = self.ahead_bytes + window.waiting_bytes + 1 - limit_bytes
                    if lacking_bytes > 0 and not window.make_room(lacking_bytes, self._sooner):
                        return
                self.bring_back(item)
            elif item in window.waiting:
                self._sooner.add(item)
            upcoming.popleft()

    def note_reload(self, item: int, nbytes: int) -> None:
        """Count *item*, whose copy to the device was just queued, as brought back ahead."""
        self.ahead[item] = nbytes
        self.ahead_bytes += nbytes

    def note_use(self, item: int) -> None:
        """Note that *item* is used, or dropped: it is not ahead any more."""
        self.ahead_bytes -= self.ahead.pop(item, 0)

    def reset(self, kept: Collection[int] = NO_ITEMS) -> None:
        """Forget what was coming: this backward is over. *kept* wait for another one."""
        self._upcoming.clear()
        self._groups = iter(())
        self.is_exhausted = True
        ahead = self.ahead
        self.ahead = {item: ahead[item] for item in kept if item in ahead}
        self.ahead_bytes = sum(self.ahead.values())

    def _extend(self) -> bool:
        for group in self._groups:
            if group:
                self._upcoming.extend(group)
                return True
        return False
