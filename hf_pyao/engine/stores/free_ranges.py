"""Which ranges of something linear are free: of a slab of memory, of a file."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable


class FreeRanges:
    """The free ranges of *nbytes*, as a sorted list of (offset, nbytes)."""

    def __init__(self, nbytes: int) -> None:
        self.free: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []

    def take(self, nbytes: int) -> int | None:
        """Cut *nbytes* from the smallest free range that holds them; None if none does."""
        best = min(
            ((size, offset) for offset, size in self.free if size >= nbytes),
            default=None,
        )
        if best is None:
            return None
        size, offset = best
        self.free.remove((offset, size))
        if size > nbytes:
            insort(self.free, (offset + nbytes, size - nbytes))
        return offset

    def give_back(self, offset: int, nbytes: int) -> None:
        """Free *nbytes* from *offset* on, and join them with free neighbours."""
        free = self.free
        at = bisect_left(free, (offset, 0))
        if at < len(free) and free[at][0] == offset + nbytes:
            nbytes += free.pop(at)[1]
        if at and sum(free[at - 1]) == offset:
            at -= 1
            first, before = free.pop(at)
            offset, nbytes = first, before + nbytes
        free.insert(at, (offset, nbytes))

    def free_all_but(self, taken: Iterable[tuple[int, int]], nbytes: int) -> None:
        """Free all of *nbytes* except *taken*, ranges (offset, nbytes) in ascending order."""
        free = []
        start = 0
        for offset, taken_bytes in [*taken, (nbytes, 0)]:
            if offset > start:
                free.append((start, offset - start))
            start = offset + taken_bytes
        self.free = free
