"""Reads and writes ranges of a file, checks what came, and tries again once."""

from __future__ import annotations

import logging
import threading
import time

from hf_pyao.engine.checksums import checksum as checksum_of
from hf_pyao.engine.stores.disk_figures import BusyClock, DiskFigures
from hf_pyao.engine.stores.disk_files import disk_error
from hf_pyao.engine.stores.disk_lanes import READ, WRITE
from hf_pyao.engine.stores.disk_range import DiskRange
from hf_pyao.engine.stores.nameless_file import NamelessFile
from hf_pyao.engine.stores.raw_bytes import raw_bytes
from hf_pyao.errors import warn

logger = logging.getLogger(__name__)

REMEDY = "Check the drive (dmesg, smartctl), or leave disk_path out."


class DiskAccess:
    """What threads do with ranges that have memory.

    Args:
        file: has the ranges.
        lock: held while figures change.
    """

    def __init__(self, file: NamelessFile, lock: threading.RLock) -> None:
        self.figures = DiskFigures()
        self._file = file
        self._lock = lock
        self._busy = {WRITE: BusyClock(), READ: BusyClock()}

    def write(self, held: DiskRange) -> OSError | None:
        """Write the memory of *held*; return why that failed twice, or None."""
        assert held.memory is not None
        content = raw_bytes(held.memory)
        held.written_with(self._checksum(held, content))
        return self._access(held, WRITE, content)

    def read(self, held: DiskRange) -> None:
        """Fill the memory of *held* from the file.

        Raises:
            DiskError: that failed twice.
        """
        assert held.memory is not None
        failure = self._access(held, READ, raw_bytes(held.memory))
        if failure is not None:
            raise disk_error("read", self._file.path, failure, REMEDY) from failure

    def check(self, held: DiskRange) -> None:
        """Compare the memory of *held* with its checksum; read it once more if they differ.

        Raises:
            DiskError: they still differ, or it cannot be read.
        """
        assert held.memory is not None
        content = raw_bytes(held.memory)
        if self._checksum(held, content) == held.checksum:
            return
        self._note_retry(held, READ, "its checksum differs")
        self.read(held)
        if self._checksum(held, content) != held.checksum:
            raise disk_error(
                "use",
                self._file.path,
                f"bytes {held.offset} to {held.offset + held.nbytes} are not those that were "
                "written (checksum)",
                REMEDY,
            )

    def _checksum(self, held: DiskRange, content: memoryview) -> int:
        began_s = time.perf_counter()
        checksum = checksum_of(content[: held.nbytes])
        with self._lock:
            self.figures.check_ms += 1e3 * (time.perf_counter() - began_s)
        return checksum

    def _access(self, held: DiskRange, lane: str, content: memoryview) -> OSError | None:
        """Read or write *content*, once more if it fails; return the second failure, or None."""
        access = self._file.write if lane == WRITE else self._file.read
        clock = self._busy[lane]
        with self._lock:
            clock.begin()
        try:
            try:
                access(content, held.offset)
            except OSError as first:
                self._note_retry(held, lane, first.strerror or repr(first))
                try:
                    access(content, held.offset)
                except OSError as second:
                    second.__context__ = None  # frames of callers would live as long as the error
                    return second.with_traceback(None)
            return None
        finally:
            with self._lock:
                elapsed_ms = clock.end()
                if lane == WRITE:
                    self.figures.write_ms += elapsed_ms
                else:
                    self.figures.read_ms += elapsed_ms

    def _note_retry(self, held: DiskRange, lane: str, reason: str) -> None:
        with self._lock:
            self.figures.num_retries += 1
        warn(
            logger,
            "disk-read-again",
            "bytes from %d on of %s are %s again: %s.",
            held.offset,
            self._file.path,
            "written" if lane == WRITE else "read",
            reason,
        )
