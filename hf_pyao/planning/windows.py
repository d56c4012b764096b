"""The engine's windows by arithmetic: what waits to leave, and what is brought back next.

The rules are those of ``transfer.window`` ([Note: Window] in ``transfer.transport``), on numbers of
slots instead of tensors. Times and memory are the caller's (``predict``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence


class Windows:
    """What is in flight in one step, by number of slot.

    Args:
        limit_bytes: what may be in flight; None: compute and copies meet at the end of each layer.
        by_layer: the slots of each layer that leave, in the order in which they are saved.
    """

    def __init__(self, limit_bytes: int | None, by_layer: Mapping[int, Sequence[int]]) -> None:
        self.limit_bytes = limit_bytes
        self.waiting: dict[int, int] = {}
        """Bytes of the slots that wait to leave, oldest first."""
        self.waiting_bytes = 0
        self.ahead_bytes = 0
        """What was brought back, and is not used yet."""
        self.is_exhausted = True
        """Nothing is left to bring back ahead."""
        self._by_layer = by_layer
        self._upcoming: deque[int] = deque()
        self._groups: Iterator[Sequence[int]] = iter(())
        self._over: deque[int] = deque()
        self._needed_sooner: set[int] = set()
        self._has_later = True
        """Something that waits may be needed later than the next reload."""

    # ---- to the host ---------------------------------------------------------------------------

    def add(self, number: int, nbytes: int) -> None:
        """Let a slot wait to leave."""
        self.waiting[number] = nbytes
        self.waiting_bytes += nbytes
        self._has_later = True

    @property
    def oldest(self) -> int:
        """The slot that has waited for the longest."""
        return next(iter(self.waiting))

    @property
    def is_overfull(self) -> bool:
        """More waits to leave than may."""
        return self.limit_bytes is not None and self.waiting_bytes > self.limit_bytes

    def remove(self, number: int) -> None:
        """Note that the device copy of a slot is let go."""
        self.waiting_bytes -= self.waiting.pop(number)

    def ends(self, number: int) -> None:
        """Note that backward is done with a slot."""
        if number in self.waiting:
            self._over.append(number)

    # ---- back to the device --------------------------------------------------------------------

    def start(self, layer: int) -> None:
        """Aim at the slots of *layer*, whose backward begins, and at those of the layers before."""
        self._upcoming = deque(reversed(self._by_layer.get(layer, ())))
        self._groups = (self._by_layer.get(each, ()) for each in range(layer - 1, -1, -1))
        self._needed_sooner.clear()
        self._has_later = True
        self.is_exhausted = False
        if self.limit_bytes is None:
            self._extend()

    def next_slot(self, is_on_host: Callable[[int], bool]) -> int | None:
        """Return what to bring back next; None if nothing is left, or enough is ahead."""
        limit, upcoming = self.limit_bytes, self._upcoming
        while limit is None or self.ahead_bytes < limit:
            if not upcoming and not (limit is not None and self._extend()):
                self.is_exhausted = True
                return None
            number = upcoming[0]
            if is_on_host(number):
                return number
            if number in self.waiting:
                self._needed_sooner.add(number)
            upcoming.popleft()
        return None

    @property
    def lacking_bytes(self) -> int:
        """How much more room the next reload needs."""
        if self.limit_bytes is None:
            return 0
        return max(0, self.ahead_bytes + self.waiting_bytes + 1 - self.limit_bytes)

    def make_room(self, nbytes: int) -> tuple[list[int], bool]:
        """Return which slots are to be let go for *nbytes*, and whether they suffice.

        In the order in which they go. Those that backward is done with come first, then those that
        it needs later than what the room is for.
        """
        meant: list[int] = []
        while nbytes > 0 and self._over:
            number = self._over.popleft()
            if number in self.waiting:
                meant.append(number)
                nbytes -= self.waiting[number]
        if nbytes > 0 and self._has_later:
            for number, freed_bytes in self.waiting.items():
                if number in self._needed_sooner or number in meant:
                    continue
                meant.append(number)
                nbytes -= freed_bytes
                if nbytes <= 0:
                    break
            else:
                self._has_later = False
        return meant, nbytes <= 0

    def _extend(self) -> bool:
        for group in self._groups:
            if group:
                self._upcoming.extend(reversed(group))
                return True
        return False
