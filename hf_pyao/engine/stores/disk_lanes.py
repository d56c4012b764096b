"""Threads on which a disk is written and read beside compute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeAlias

from hf_pyao.engine.stores.disk_threads import DaemonThreads

Job: TypeAlias = Callable[[], None]
"""What runs on a lane; it raises nothing."""

WRITE, READ, CHECK = "write", "read", "check"

NUM_THREADS = {WRITE: 2, READ: 4, CHECK: 2}
"""Threads of each lane; drives reach their speed at 2 to 4 accesses at once."""


class DiskLanes(Protocol):
    """Runs jobs, of one lane in any order, beside the caller."""

    def submit(self, lane: str, job: Job) -> None:
        """Have *job* run on *lane*; the caller holds the lock that :meth:`wait` is given."""
        ...

    def wait(self, changed: threading.Condition) -> None:
        """Let jobs go on until *changed* is notified; the caller holds its lock."""
        ...

    def tick(self) -> None:
        """Let jobs go on that may, without waiting."""
        ...

    def close(self) -> None:
        """Let the jobs that were submitted end, and end the threads."""
        ...


class ThreadedLanes:
    """Jobs on threads, which start with the first one."""

    def __init__(self) -> None:
        self._pools: dict[str, DaemonThreads] = {}

    def submit(self, lane: str, job: Job) -> None:
        """Run *job* on a thread of *lane*."""
        pool = self._pools.get(lane)
        if pool is None:
            pool = self._pools[lane] = DaemonThreads(NUM_THREADS[lane], f"pyao-disk-{lane}")
        pool.submit(job)

    def wait(self, changed: threading.Condition) -> None:
        """Wait until *changed* is notified."""
        changed.wait(timeout=1.0)  # a thread that could not tell must not stop this one for good

    def tick(self) -> None:
        """Do nothing: threads go on by themselves."""

    def close(self) -> None:
        """Wait for all jobs, and end the threads."""
        for lane in NUM_THREADS:  # in this order: what has been read is checked on another lane
            if (pool := self._pools.get(lane)) is not None:
                pool.close()
        self._pools = {}
