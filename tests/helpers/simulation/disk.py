"""A disk that is not there: late, in any order, torn, and failing where a test says so."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from hf_pyao.engine.stores.disk_files import PAGE_BYTES
from hf_pyao.engine.stores.disk_lanes import Job
from hf_pyao.engine.stores.nameless_file import DiskCalls
from hf_pyao.errors import InternalError

Failures: TypeAlias = Callable[[str, int], int]
"""Says whether an access fails; see :class:`SimulatedDisk`."""


class _Task:
    """A job that runs at once, or on a thread that goes on only when it is told to."""

    def __init__(self, job: Job, lanes: SimulatedLanes, *, may_pause: bool) -> None:
        self.may_pause = may_pause
        self.is_over = False
        self.go = threading.Event()
        self.paused = threading.Event()
        self._job = job
        self._lanes = lanes
        self.thread: threading.Thread | None = None

    def resume(self) -> None:
        """Let the job go on to its next pause, or its end."""
        if not self.may_pause:
            self._job()
            self.is_over = True
            self.paused.set()
            return
        self.paused.clear()
        self.go.set()
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, daemon=True)
            self.thread.start()

    def pause(self) -> None:
        """On the job's thread: stop until :meth:`resume`."""
        self.go.clear()
        self._lanes.note_pause(self)
        self.go.wait()

    def _run(self) -> None:
        self.go.wait()
        self._job()
        self.is_over = True
        self._lanes.note_pause(self)


class SimulatedLanes:
    """Jobs that run as late as they may, or at any earlier moment, in any order.

    One thread runs at a time, and the seed draws which: the same seed and program give the same
    schedule. A job may stop in the middle of an access (:meth:`pause`).

    Args:
        seed: draws the schedule.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._eagerness = self._random.choice((0.0, 0.1, 0.5, 0.8))
        self._tasks: list[_Task] = []
        self._changed: threading.Condition | None = None
        self._running: _Task | None = None

    def submit(self, lane: str, job: Job) -> None:
        """Keep *job* for later."""
        self._tasks.append(_Task(job, self, may_pause=self._random.random() < 0.3))

    def wait(self, changed: threading.Condition) -> None:
        """Let some job go on; the lock is free meanwhile."""
        self._changed = changed
        if self._running is not None or not self._tasks:
            raise InternalError("nothing goes on that this could wait for")
        task = self._next()
        while not task.paused.is_set():
            changed.wait(0.001)
        self._end(task)

    def tick(self) -> None:
        """Let some jobs go on, if the schedule says so."""
        if self._running is not None:
            return
        while self._tasks and self._random.random() < self._eagerness:
            task = self._next()
            task.paused.wait()
            self._end(task)

    def pause(self) -> None:
        """Stop in the middle of an access, if the schedule says so."""
        task = self._running
        if (
            task is not None
            and task.thread is threading.current_thread()
            and self._random.random() < 0.7
        ):
            task.pause()

    def close(self) -> None:
        """Let all jobs end."""
        while self._tasks:
            task = self._next()
            task.paused.wait()
            self._end(task)

    def note_pause(self, task: _Task) -> None:
        """On a job's thread: let the caller go on."""
        changed = self._changed
        task.paused.set()
        if changed is not None and changed.acquire(blocking=False):
            changed.notify_all()
            changed.release()

    def _next(self) -> _Task:
        task = self._running = self._random.choice(self._tasks)
        task.resume()
        return task

    def _end(self, task: _Task) -> None:
        self._running = None
        if task.is_over:
            self._tasks.remove(task)


class SimulatedDisk(DiskCalls):
    """Keeps a file's bytes in memory, in pieces of whole pages, and fails where it is told to.

    Args:
        lanes: are asked in the middle of each access whether it stops there.
        seed: draws where accesses end early.
        fail: called with ``"write"``, ``"read"`` or ``"allocate"`` and the access' number; returns
            an error number of :mod:`errno` for an access that fails, ``-1`` for one whose bytes are
            damaged, and 0 for others.
    """

    def __init__(self, lanes: SimulatedLanes, seed: int, fail: Failures | None = None) -> None:
        self.content = bytearray()
        self.num_accesses = 0
        self._lanes = lanes
        self._random = random.Random(seed)
        self._fail = fail

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write some of the bytes."""
        code = self._code("write")
        (memory,) = buffers
        count = self._count(len(memory))
        half = count // 2
        self.content[offset : offset + half] = memory[:half]
        self._lanes.pause()
        if code > 0:
            raise OSError(code, "a simulated failure")
        self.content[offset + half : offset + count] = memory[half:count]
        if code < 0:
            self.content[offset] ^= 1
        return count

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read some of the bytes."""
        code = self._code("read")
        (memory,) = buffers
        count = self._count(len(memory))
        half = count // 2
        memory[:half] = self.content[offset : offset + half]
        self._lanes.pause()
        if code > 0:
            raise OSError(code, "a simulated failure")
        memory[half:count] = self.content[offset + half : offset + count]
        if code < 0:
            memory[0] ^= 1
        return count

    def allocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Reserve room."""
        if (code := self._code("allocate")) > 0:
            raise OSError(code, "a simulated failure")
        self.content.extend(bytes(offset + nbytes - len(self.content)))

    def _code(self, kind: str) -> int:
        number = self.num_accesses
        self.num_accesses += 1
        return 0 if self._fail is None else self._fail(kind, number)

    def _count(self, nbytes: int) -> int:
        """Return how many of *nbytes* are transferred: all, or some from a page on."""
        if nbytes <= PAGE_BYTES or self._random.random() < 0.7:
            return nbytes
        return self._random.randrange(PAGE_BYTES, nbytes)
