"""When copies run, by arithmetic: one or two copy engines, and links that are never early."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hf_pyao.plan.hardware.speeds import LinkModel

OFFLOAD = "offload"
RELOAD = "reload"
GRADIENT = "gradient"

DISK = "disk"

_ORDER = {RELOAD: 0, DISK: 1, OFFLOAD: 2, GRADIENT: 3}
"""What a shared engine takes first."""

_PARTS = 16
"""Of the host memory that the disk is read into, and no fewer of a copy."""


@dataclass(eq=False)
class Copy:
    """A copy that was queued."""

    direction: str
    nbytes: int
    ready_ms: float
    needs: Copy | None = None
    """A copy that has to end before this one starts."""
    slot: int = -1
    """Number of the slot that it is of; -1: of none."""
    layer: int = -1
    """Layer whose streamed weights it is of; -1: of none."""
    staging_bytes: int = 0
    """Host memory through which it comes from the disk; 0: the host has it."""
    slower: float = 1.0
    """By what the disk reads it more slowly, since saved tensors use the disk too."""
    order: int = -1
    """Position in the queue of its direction; -1 until it is booked."""
    start_ms: float = math.inf
    """Infinite until it is known."""
    end_ms: float = math.inf
    """Infinite until it is known."""

    def wait_until(self, ready_ms: float) -> None:
        """Start at *ready_ms* at the earliest."""
        self.ready_ms = ready_ms

    @property
    def queue(self) -> str:
        """Of copies to the device those from the disk wait by themselves, and let others pass."""
        return DISK if self.staging_bytes else self.direction


class Lanes(Protocol):
    """Says when copies are done. Times are in ms since the step began, and only grow."""

    def book(self, copy: Copy) -> None:
        """Queue *copy*."""
        ...

    def is_done(self, copy: Copy, now_ms: float) -> bool:
        """Say whether *copy* has ended by *now_ms*, as far as the host knows."""
        ...

    def wait(self, copy: Copy, now_ms: float) -> float:
        """Return when compute goes on if it waits for *copy* now."""
        ...

    def finish(self, now_ms: float) -> float:
        """Return when everything that was queued has ended, or *now_ms* if that is later."""
        ...


class LateLanes:
    """Copies that take no time and are done only when something waits for them.

    What may be in flight then always is: peaks hold on every link.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[Copy]] = {name: deque() for name in _ORDER}
        self._orders = itertools.count()

    def book(self, copy: Copy) -> None:
        """Queue *copy*."""
        copy.order = next(self._orders)
        self._queues[copy.queue].append(copy)

    def is_done(self, copy: Copy, now_ms: float) -> bool:
        """Say whether something has waited for *copy*, or for one behind it."""
        return copy.end_ms < math.inf

    def wait(self, copy: Copy, now_ms: float) -> float:
        """End *copy*, and those before it."""
        queue = self._queues[copy.queue]
        while copy.end_ms > now_ms:
            ended = queue.popleft()
            ended.start_ms = ended.end_ms = now_ms
        return now_ms

    def finish(self, now_ms: float) -> float:
        """Return *now_ms*."""
        return now_ms


class DiskReads:
    """When bytes of a disk are read and copied, a small part at a time.

    A part is read once the disk is free and the host memory for it is, which the copy of an earlier
    part frees. It is copied once it is read, its slot is free and the part before was copied.
    Before the step begins that memory is full, as the step before has left it.

    Args:
        link: has the speeds of the disk and of the copies.
    """

    def __init__(self, link: LinkModel) -> None:
        self._link = link
        self._read_ms: float | None = None
        """When the disk is free; None: nothing was read in this step."""
        self._sums: list[int] = []
        """By part that was copied, the bytes of all up to it."""
        self._copied_ms: list[float] = []
        """By the same, when its copy ended."""
        self._tried: tuple[Copy, float, _Parts] | None = None

    def start_of_copy(self, copy: Copy, start_ms: float) -> float:
        """Return when a copy starts that could from *start_ms* on, if it never waits inside."""
        if self._tried is None or self._tried[:2] != (copy, start_ms):
            self._tried = copy, start_ms, self._parts(copy, start_ms)
        end_ms = self._tried[2].copied_ms[-1]
        return max(start_ms, end_ms - self._link.copy_ms(RELOAD, copy.nbytes))

    def note_copy(self, copy: Copy) -> None:
        """Note that *copy*, which was asked about last, starts."""
        assert self._tried is not None
        assert self._tried[0] is copy
        parts, self._tried = self._tried[2], None
        self._read_ms = parts.read_ms
        self._sums += parts.sums
        self._copied_ms += parts.copied_ms

    def _parts(self, copy: Copy, start_ms: float) -> _Parts:
        link, staging_bytes = self._link, copy.staging_bytes
        read_ms = self._read_ms
        if read_ms is None:
            read_ms = -link.read_ms(staging_bytes) * copy.slower
        size = max(1, min(staging_bytes, copy.nbytes) // _PARTS)
        before = self._sums[-1] if self._sums else 0
        now_ms = max(start_ms, self._copied_ms[-1]) if self._copied_ms else start_ms
        sums: list[int] = []
        copied_ms: list[float] = []
        for first in range(0, copy.nbytes, size):
            nbytes = min(size, copy.nbytes - first)
            end = before + first + nbytes
            must_be_copied = end - staging_bytes
            if must_be_copied > before:
                read_ms = max(read_ms, copied_ms[bisect_left(sums, must_be_copied)])
            elif must_be_copied > 0:
                read_ms = max(read_ms, self._copied_ms[bisect_left(self._sums, must_be_copied)])
            read_ms += link.read_ms(nbytes) * copy.slower
            share = nbytes / copy.nbytes
            now_ms = max(now_ms, read_ms) + share * link.copy_ms(RELOAD, copy.nbytes)
            sums.append(end)
            copied_ms.append(now_ms)
        return _Parts(read_ms, sums, copied_ms)


class _Parts(NamedTuple):
    """The parts of one copy."""

    read_ms: float
    """When the last is read."""
    sums: list[int]
    copied_ms: list[float]


class TimedLanes:
    """Copies on one or two engines: each runs one copy at a time, and is not preempted.

    All that touches host memory shares its bandwidth: a copy that runs beside another is slowed
    down where both together want more than there is.

    What comes from the disk is read in the order in which it is queued, ahead of its copy as far as
    the host memory for it reaches. Its copy shares the engine with the others, takes no less than
    the slower of both, and holds the engine for its own bytes alone: others pass while it waits for
    the disk.
    """

    def __init__(self, link: LinkModel) -> None:
        self._link = link
        both = link.d2h_gib_per_s + link.h2d_gib_per_s
        self._slowdown = max(1.0, both / link.host_memory_gib_per_s)
        alone = max(link.d2h_gib_per_s, link.h2d_gib_per_s) / link.host_memory_gib_per_s
        self._slowdown_alone = max(1.0, alone)
        self._queues: dict[str, deque[Copy]] = {name: deque() for name in _ORDER}
        self._orders = itertools.count()
        shared = link.copy_engines == 1
        out = (OFFLOAD, GRADIENT)
        engines = [(RELOAD, DISK, *out)] if shared else [(RELOAD, DISK), out]
        self._reads = DiskReads(link)
        self._free_ms = [0.0] * len(engines)
        self._lanes = [
            (_ORDER[direction], engine, self._queues[direction])
            for engine, directions in enumerate(engines)
            for direction in directions
        ]

    def book(self, copy: Copy) -> None:
        """Queue *copy*."""
        copy.order = next(self._orders)
        self._queues[copy.queue].append(copy)

    def is_done(self, copy: Copy, now_ms: float) -> bool:
        """Say whether *copy* has ended by *now_ms*, which may lie before compute's own time."""
        if now_ms <= 0:
            return False  # copies take time
        self._run(now_ms)
        return copy.end_ms <= now_ms

    def wait(self, copy: Copy, now_ms: float) -> float:
        """Return when compute goes on if it waits for *copy* now."""
        while copy.end_ms == math.inf:
            assert self._start_next(math.inf), "a copy waits for one that was not queued"
        return max(now_ms, copy.end_ms)

    def finish(self, now_ms: float) -> float:
        """Return when everything that was queued has ended."""
        self._run(math.inf)
        return max(now_ms, *self._free_ms)

    def _run(self, until_ms: float) -> None:
        while self._start_next(until_ms):
            pass

    def _start_next(self, until_ms: float) -> bool:
        """Start the copy that starts first, if any starts by then."""
        first: tuple[float, int, int, deque[Copy]] | None = None
        for order, engine, queue in self._lanes:
            if not queue:
                continue
            copy = queue[0]
            start_ms = max(copy.ready_ms, self._free_ms[engine])
            if copy.needs is not None and copy.needs.end_ms > start_ms:
                start_ms = copy.needs.end_ms
            if copy.staging_bytes:
                start_ms = self._reads.start_of_copy(copy, start_ms)
            if start_ms < math.inf and (first is None or (start_ms, order) < first[:2]):
                first = (start_ms, order, engine, queue)
        if first is None or first[0] > until_ms:
            return False
        start_ms, _, engine, queue = first
        copy = queue.popleft()
        kind = RELOAD if copy.direction == RELOAD else OFFLOAD
        if copy.staging_bytes:
            self._reads.note_copy(copy)
        others_run = any(
            free_ms > start_ms for number, free_ms in enumerate(self._free_ms) if number != engine
        )
        slowdown = self._slowdown if others_run else self._slowdown_alone
        copy.start_ms = start_ms
        copy.end_ms = start_ms + self._link.copy_ms(kind, copy.nbytes) * slowdown
        self._free_ms[engine] = copy.end_ms
        return True
