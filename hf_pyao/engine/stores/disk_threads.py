"""Threads that wait for disks and compute checksums, and that nothing waits for.

[Note: Daemon threads]
Those of :class:`concurrent.futures.ThreadPoolExecutor` are no daemons. Python waits for them at its
end, and an access that does not return would then block the exit. They would also count as threads
that may draw random numbers (:func:`~hf_pyao.engine.rerun.generators.may_be_disturbed`), so that no
layer that draws could run again beside a disk.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from hf_pyao.errors import InternalError

Work: TypeAlias = Callable[..., None]
"""What runs on a thread; it raises nothing."""


class DaemonThreads:
    """Up to *num* threads that take work in order. They start when there is work for them.

    They end with :meth:`close`, or when no one refers to this object any more.

    Args:
        num: most threads at once.
        name: of the threads, followed by a number.
    """

    def __init__(self, num: int, name: str) -> None:
        self._num = num
        self._name = name
        self._work: queue.SimpleQueue[tuple[Work, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False
        # No thread refers to this object, which so ends them when it is let go.
        weakref.finalize(self, self._work.put, None).atexit = False

    def submit(self, work: Work, *args: Any) -> None:
        """Call *work* with *args* on a thread.

        Raises:
            InternalError: these threads were ended.
        RuntimeError: no thread can be started.
        """
        with self._lock:
            if self._is_closed:
                raise InternalError(
                    f"work was given to the threads {self._name!r}, which were ended"
                )
            if len(self._threads) < self._num:
                self._start_one()
            self._work.put((work, args))

    def close(self) -> None:
        """Let the work that was submitted end, and then the threads."""
        with self._lock:
            self._is_closed = True
            self._work.put(None)
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _start_one(self) -> None:
        thread = threading.Thread(
            target=_run, args=(self._work,), name=f"{self._name}-{len(self._threads)}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:  # those that run take the work, if more slowly
                raise
        else:
            self._threads.append(thread)


def _run(work: queue.SimpleQueue[tuple[Work, tuple[Any, ...]] | None]) -> None:
    for each in iter(work.get, None):
        function, args = each
        function(*args)
        del each, function, args  # a waiting thread keeps nothing
    work.put(None)  # for the next thread
