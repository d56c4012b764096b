"""Reads blocks of a file into host memory on a few threads, and checks what came.

[Note: Reads of blocks]
- A read is divided into ranges of :data:`RANGE_BYTES`, which :data:`NUM_READERS` threads read at
  once with ``preadv``, straight into the caller's memory. Calls of the kernel release the GIL.
- Other threads compute the checksums of a range as soon as it is there, so that the next range is
  read meanwhile. :meth:`BlockRead.wait` returns only when all of them agree.
- The kernel may return fewer bytes than were asked for. What is missing is read from the whole page
  on in which the read ended: direct reads begin at whole pages.
- A failed range, or one whose checksum differs, is read once more. What fails twice is an error
  that names the file.
- In the child of a fork the threads do not exist, and whoever held a lock never gives it back. The
  child's first read starts anew, and what was being read as it was forked is read again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for

import torch

from hf_pyao.engine.checksums import checksum
from hf_pyao.engine.stores.disk_blocks import CHUNK_BYTES, BlockFile, BlockPlace, padded
from hf_pyao.engine.stores.disk_figures import BusyClock
from hf_pyao.engine.stores.disk_files import PAGE_BYTES, disk_error, drop_pages
from hf_pyao.engine.stores.disk_threads import DaemonThreads
from hf_pyao.engine.stores.raw_bytes import raw_bytes
from hf_pyao.errors import InternalError, warn

logger = logging.getLogger(__name__)

NUM_READERS = 4
"""Threads that read; drives reach their speed at 2 to 4 reads at once."""

NUM_CHECKERS = 4
"""Threads that compute checksums. One core checks 2 to 5 GB/s; drives may read faster."""

RANGE_BYTES = 8 * CHUNK_BYTES
"""Most bytes of one read."""

_REMEDY = "Check the drive, and remove the file: the next run writes it again."

ReadInto = Callable[[int, Sequence[memoryview], int], int]
"""``os.preadv``; tests pass one that fails."""


class DiskReader:
    """Threads that read blocks. They start with the first read.

    Args:
        read_into: reads a descriptor into buffers from an offset on.
    """

    def __init__(self, read_into: ReadInto | None = None) -> None:
        self._read_into: ReadInto = read_into or os.preadv
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._readers: DaemonThreads | None = None
        self._checkers: DaemonThreads | None = None
        self.read_bytes = 0
        """Bytes that were read and agreed with their checksums, padding included."""
        self.num_retries = 0
        """Ranges that were read once more."""
        self.check_ms = 0.0
        """Time in which checksums were computed."""
        self.read_ms = 0.0
        """Time in which some thread read."""
        self._busy = BusyClock()

    def read(
        self, file: BlockFile, place: BlockPlace, target: torch.Tensor, first: int, nbytes: int
    ) -> BlockRead:
        """Begin to read bytes of a block.

        Args:
            file: the file.
            place: the block in it.
            target: uint8, on the host, at a multiple of 4096 bytes, with room for the bytes that
                :func:`span_of` says. No one reads or writes it until the read has ended.
            first: first byte of the block that is wanted.
            nbytes: how many.
        """
        start, end = span_of(place, first, nbytes)
        if target.data_ptr() % PAGE_BYTES or target.numel() < padded(end - start):
            raise InternalError("the target of a read is not aligned, or too small")
        self._start_anew_if_forked()
        with self._lock:
            if self._readers is None or self._checkers is None:
                self._readers = DaemonThreads(NUM_READERS, "pyao-disk-read")
                self._checkers = DaemonThreads(NUM_CHECKERS, "pyao-disk-check")
            readers, checkers = self._readers, self._checkers
        read = BlockRead(file, place, target, start, end)
        firsts = range(start, end, RANGE_BYTES)
        read.ranges = [Future() for _ in firsts]
        try:
            for at, checked in zip(firsts, read.ranges, strict=True):
                readers.submit(self._read_range, read, at, checked, checkers)
        except BaseException:  # an interrupt: no one knows which ranges were handed over
            read.is_cancelled = True
            self.close()
            raise
        return read

    def close(self) -> None:
        """Let reads that have begun end, and end the threads. A later read starts them again."""
        self._start_anew_if_forked()
        with self._lock:
            pools = self._readers, self._checkers
            self._readers = self._checkers = None
        for pool in pools:
            if pool is not None:
                pool.close()

    def _start_anew_if_forked(self) -> None:
        if self._process_id != os.getpid():
            self._process_id = os.getpid()
            self._lock, self._busy = threading.Lock(), BusyClock()
            self._readers = self._checkers = None

    def _read_range(
        self, read: BlockRead, at: int, checked: Future[None], checkers: DaemonThreads
    ) -> None:
        """Read a range on a reader's thread; hand it to the checker's, or note the error."""
        if read.is_cancelled:
            checked.set_result(None)
            return
        try:
            with self._lock:
                self._busy.begin()
            try:
                self._fill(read, at)
            except OSError as cause:
                self._note_retry(read, at, cause.strerror or repr(cause))
                self._fill(read, at)
            finally:
                with self._lock:
                    self.read_ms += self._busy.end()
            checkers.submit(self._check_range, read, at, checked)
        except BaseException as cause:
            checked.set_exception(cause)

    def _check_range(self, read: BlockRead, at: int, checked: Future[None]) -> None:
        try:
            if not self._agrees(read, at):
                self._note_retry(read, at, "its checksum differs")
                self._fill(read, at)
                if not self._agrees(read, at):
                    raise disk_error(
                        "use", read.file.path, f"bytes from {read.place.offset + at} on are not "
                        "those that were written (checksum)", _REMEDY
                    )  # fmt: skip
            with self._lock:
                self.read_bytes += padded(min(at + RANGE_BYTES, read.end) - at)
            checked.set_result(None)
        except BaseException as cause:
            checked.set_exception(cause)

    def _note_retry(self, read: BlockRead, at: int, reason: str) -> None:
        with self._lock:
            self.num_retries += 1
        warn(
            logger,
            "disk-read-again",
            "bytes from %d on of %s are read again: %s.",
            read.place.offset + at,
            read.file.path,
            reason,
        )

    def _fill(self, read: BlockRead, at: int) -> None:
        """Read the whole range that begins at byte *at* of the block."""
        nbytes = padded(min(at + RANGE_BYTES, read.end) - at)
        memory = raw_bytes(read.target)[at - read.start : at - read.start + nbytes]
        descriptor, offset = read.file.descriptor, read.place.offset + at
        done = 0
        while done < nbytes:
            got = self._read_into(descriptor, [memory[done:]], offset + done)
            if got <= 0:
                raise OSError(None, f"it ends at byte {offset + done}")
            whole = (done + got) // PAGE_BYTES * PAGE_BYTES
            if whole == done and done + got < nbytes:
                raise OSError(None, f"fewer bytes than a page came from byte {offset + done} on")
            done = nbytes if done + got >= nbytes else whole
        if not read.file.is_direct:
            drop_pages(descriptor, offset, nbytes)

    def _agrees(self, read: BlockRead, at: int) -> bool:
        began = time.perf_counter()
        memory = raw_bytes(read.target)
        agrees = True
        for first in range(at, min(at + RANGE_BYTES, read.end), CHUNK_BYTES):
            last = min(first + CHUNK_BYTES, read.end)
            chunk = memory[first - read.start : last - read.start]
            agrees &= checksum(chunk) == read.place.checksums[first // CHUNK_BYTES]
        with self._lock:
            self.check_ms += 1e3 * (time.perf_counter() - began)
        return agrees


class BlockRead:
    """A read that has begun. It keeps its target until it has ended."""

    def __init__(
        self, file: BlockFile, place: BlockPlace, target: torch.Tensor, start: int, end: int
    ) -> None:
        self.file = file
        self.place = place
        self.target = target
        self.start = start
        """First byte of the block that is read: the target's first byte."""
        self.end = end
        """Byte behind the last that is read."""
        self.ranges: list[Future[None]] = []
        """By range, done once its checksums agree."""
        self.is_cancelled = False
        self._process_id = os.getpid()

    @property
    def is_lost(self) -> bool:
        """True in the child of a fork, if it began before: no thread of this process reads it."""
        return self._process_id != os.getpid()

    @property
    def is_done(self) -> bool:
        """True once all bytes are there and agree with their checksums, or none will come."""
        return self.is_lost or all(each.done() for each in self.ranges)

    def wait(self) -> None:
        """Wait until all bytes are there and agree with their checksums.

        After an error nothing writes into the target.

        Raises:
            DiskError: they cannot be read, or are not those that were written.
            InternalError: the read was cancelled.
        """
        if self.is_cancelled:
            raise InternalError("a cancelled read has no bytes")
        try:
            for each in self.ranges:
                each.result()
        except BaseException as cause:
            self.cancel()  # also on an interrupt: other ranges must not write into the target later
            if isinstance(cause, OSError):
                raise disk_error("read", self.file.path, cause, _REMEDY) from cause
            raise

    def wait_until_done(self, timeout_s: float) -> bool:
        """Wait for :attr:`is_done`, no longer than *timeout_s*; say whether it is."""
        return self.is_lost or not wait_for(self.ranges, timeout_s).not_done

    def cancel(self) -> None:
        """Let ranges that have not begun be left out, and wait for the others.

        After this nothing writes into the target.
        """
        self.is_cancelled = True
        if not self.is_lost:
            wait_for(self.ranges)


def span_of(place: BlockPlace, first: int, nbytes: int) -> tuple[int, int]:
    """Return the bytes of a block that are read for those from *first* on: whole checksums.

    The target needs these bytes, rounded up to whole pages.
    """
    start = first // CHUNK_BYTES * CHUNK_BYTES
    end = -(-(first + nbytes) // CHUNK_BYTES) * CHUNK_BYTES
    return start, min(end, place.nbytes)
