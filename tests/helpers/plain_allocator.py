"""A caching allocator that is slow and plain: a list of ranges, gone through for each request.

It follows ``c10/cuda/CUDACachingAllocator.cpp``, and shares no code with hf_pyao's replay of it.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
USED, FREE, BARE = "used", "free", "without memory"


@dataclass(eq=False)
class Range:
    segment: int
    start: int
    size: int
    kind: str
    pool: tuple[int, bool]
    """Stream, and whether it is the one of requests up to 1 MiB."""

    @property
    def end(self) -> int:
        return self.start + self.size


class PlainAllocator:
    """Args: as the fields of ``AllocatorSettings``, and the most that may be reserved."""

    def __init__(
        self, limit: float, *, expandable: bool, max_split: float, max_rounding: int = 20 * MIB
    ) -> None:
        self.limit, self.expandable = limit, expandable
        self.max_split, self.max_rounding = max_split, max_rounding
        self.ranges: list[Range] = []
        """By address."""
        self.num_segments = self.num_retries = self.peak_allocated = self.peak_reserved = 0

    @property
    def allocated(self) -> int:
        return sum(each.size for each in self.ranges if each.kind == USED)

    @property
    def reserved(self) -> int:
        return sum(each.size for each in self.ranges if each.kind != BARE)

    def allocate(self, nbytes: int, stream: int = 0) -> Range:
        size = max(512, -(-nbytes // 512) * 512)
        pool = (stream, size <= MIB)
        found = self.best(pool, size) or self.grow(pool, size)
        if found is None and self.release_oversized(pool, size):
            found = self.grow(pool, size)
        if found is None:
            self.release()
            self.num_retries += 1
            found = self.grow(pool, size)
        if found is None:
            raise MemoryError
        rest = found.size - size
        if self.expandable or pool[1]:
            is_split = rest >= 512
        else:
            is_split = rest > MIB and size < self.max_split
        if is_split:
            self.split(found, size)
        found.kind = USED
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return found

    def free(self, block: Range) -> None:
        block.kind = FREE
        self.merge()

    # ---- one range -----------------------------------------------------------------------------

    def split(self, block: Range, size: int) -> Range:
        rest = Range(block.segment, block.start + size, block.size - size, block.kind, block.pool)
        block.size = size
        self.ranges.insert(self.ranges.index(block) + 1, rest)
        return rest

    def merge(self) -> None:
        merged: list[Range] = []
        for each in self.ranges:
            last = merged[-1] if merged else None
            if last is not None and last.segment == each.segment and last.kind == each.kind != USED:
                last.size += each.size
            else:
                merged.append(each)
        self.ranges = merged

    def behind(self, block: Range) -> list[Range]:
        """Return a range and those at higher addresses of its segment."""
        same = [each for each in self.ranges if each.segment == block.segment]
        return same[same.index(block) :]

    def of(self, pool: tuple[int, bool], kind: str) -> list[Range]:
        return [each for each in self.ranges if each.pool == pool and each.kind == kind]

    # ---- get_free_block ------------------------------------------------------------------------

    def best(self, pool: tuple[int, bool], size: int) -> Range | None:
        fitting = [each for each in self.of(pool, FREE) if each.size >= size]
        fitting.sort(key=lambda each: (each.size, each.start))
        if not fitting:
            return None
        while len(fitting) > 1 and self.reach(fitting[1]) < self.reach(fitting[0]):
            del fitting[0]
        found = fitting[0]
        if size < self.max_split <= found.size:
            return None
        if size >= self.max_split and found.size >= size + self.max_rounding:
            return None
        return found

    def reach(self, block: Range) -> int:
        following = self.behind(block)[1:2]
        return block.size + sum(each.size for each in following if each.kind == BARE)

    # ---- alloc_block ---------------------------------------------------------------------------

    def grow(self, pool: tuple[int, bool], size: int) -> Range | None:
        if self.expandable:
            return self.expand(pool, size)
        if pool[1]:
            nbytes = 2 * MIB
        elif size < 10 * MIB:
            nbytes = 20 * MIB
        else:
            nbytes = -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved + nbytes > self.limit:
            return None
        return self.segment(pool, nbytes, FREE)

    def segment(self, pool: tuple[int, bool], nbytes: int, kind: str) -> Range:
        start = self.ranges[-1].end if self.ranges else 0
        start = -(-start // (20 * MIB)) * 20 * MIB
        self.num_segments += 1
        self.ranges.append(Range(self.num_segments, start, nbytes, kind, pool))
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return self.ranges[-1]

    def expand(self, pool: tuple[int, bool], size: int) -> Range | None:
        page = (2 if pool[1] else 20) * MIB
        stretch = self.stretch(pool, size)
        if stretch is None:
            most = 2**50 if self.limit == float("inf") else 9 * int(self.limit) // 8
            pages = -(-max(most, size) // page)
            stretch = [self.segment(pool, pages * page, BARE)]
        start = stretch[0].start
        for each in stretch:
            missing = size - (each.start - start)
            if each.kind != BARE or missing <= 0:
                continue
            nbytes = min(each.size, -(-min(missing, each.size) // page) * page)
            if self.reserved + nbytes > self.limit:
                self.merge()
                return None
            if nbytes < each.size:
                self.split(each, nbytes)
            each.kind = FREE
            self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.merge()
        return next(each for each in self.ranges if each.start == start)

    def stretch(self, pool: tuple[int, bool], size: int) -> list[Range] | None:
        """Return the lowest ranges without a used one in between that could hold *size*."""
        for bare in self.of(pool, BARE):
            at = self.ranges.index(bare)
            before = self.ranges[at - 1] if at else bare
            is_free = before.kind == FREE and before.segment == bare.segment
            found = []
            for each in self.behind(before if is_free else bare):
                if each.kind == USED:
                    break
                found.append(each)
                if sum(one.size for one in found) >= size:
                    return found
        return None

    # ---- what is given back --------------------------------------------------------------------

    def release(self) -> None:
        for block in [each for each in self.ranges if each.kind == FREE]:
            if not self.expandable:
                if [each.segment for each in self.ranges].count(block.segment) == 1:
                    self.ranges.remove(block)
                continue
            page = (2 if block.pool[1] else 20) * MIB
            start, end = -(-block.start // page) * page, block.end // page * page
            if start < end:
                if end < block.end:
                    self.split(block, end - block.start)
                if start > block.start:
                    block = self.split(block, start - block.start)
                block.kind = BARE
        self.merge()

    def release_oversized(self, pool: tuple[int, bool], size: int) -> bool:
        if self.expandable or self.max_split == float("inf"):
            return False
        wanted, total = max(size, int(self.max_split)), 0
        by_size = sorted(self.of(pool, FREE), key=lambda each: (each.size, each.start))
        enough = [each for each in by_size if each.size >= wanted]
        if enough:
            self.ranges.remove(enough[0])
            return True
        while total < wanted and by_size and by_size[-1].size >= self.max_split:
            total += by_size[-1].size
            self.ranges.remove(by_size.pop())
        return total >= wanted
