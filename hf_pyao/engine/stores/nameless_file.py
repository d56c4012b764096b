"""A file without a name, for bytes that are written and read by this process alone.

Its name is removed as soon as it is open, so that the kernel frees its room when the process ends,
however it ends. Between the two calls the name ends in ``.part``, and is locked: what a process
leaves that is killed right then is found by :func:`~.disk_files.remove_leftovers`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import weakref
from collections.abc import Sequence
from pathlib import Path

from hf_pyao.engine.stores.disk_files import (
    PAGE_BYTES,
    PART,
    disk_error,
    drop_pages,
    has_no_direct_reads,
    lock_if_free,
    remove_leftovers,
)
from hf_pyao.errors import warn

logger = logging.getLogger(__name__)


class DiskCalls:
    """The calls of the kernel that reach the disk; tests have some that fail."""

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write *buffers* from *offset* on, as ``pwritev``; return how many bytes were."""
        return os.pwritev(descriptor, buffers, offset)

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into *buffers* from *offset* on, as ``preadv``; return how many bytes came."""
        return os.preadv(descriptor, buffers, offset)

    def allocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Reserve room on the disk, as ``posix_fallocate``."""
        os.posix_fallocate(descriptor, offset, nbytes)


class NamelessFile:
    """A file that no one else can open, used past the page cache where that is possible.

    Offsets, lengths and addresses are multiples of 4096 bytes. Its methods may be called on several
    threads at once, for different ranges.

    Args:
        folder: this user's own folder, from :func:`~.disk_files.private_folder`; what killed runs
            have left there is removed.
        calls: reach the disk.

    Raises:
        DiskError: it cannot be made.
    """

    def __init__(self, folder: Path, calls: DiskCalls | None = None) -> None:
        self.path = folder / f"activations-{os.getpid()}-{secrets.token_hex(4)}{PART}"
        """Where it was; names it in messages."""
        self.nbytes = 0
        """Bytes that are reserved on the disk."""
        self._calls = calls or DiskCalls()
        try:
            remove_leftovers(folder)
            self.descriptor, self.is_direct = _open_nameless(self.path)
        except OSError as cause:
            raise disk_error(
                "make", self.path, cause, "Give disk_path another folder, or leave it out."
            ) from cause
        self._close = weakref.finalize(self, os.close, self.descriptor)
        if not self.is_direct:
            warn(
                logger,
                "disk-not-direct",
                "the file system of %s has no direct reads and writes (O_DIRECT): tensors go "
                "through the page cache, whose pages are dropped after each access. This is "
                "slower.",
                folder,
            )

    def grow(self, nbytes: int) -> None:
        """Reserve *nbytes* more on the disk.

        Raises:
            OSError: it has no room for them, or fails.
        """
        try:
            self._calls.allocate(self.descriptor, self.nbytes, nbytes)
        except OSError:
            with contextlib.suppress(OSError):  # what was allocated before it failed
                os.ftruncate(self.descriptor, self.nbytes)
            raise
        self.nbytes += nbytes

    @property
    def free_bytes(self) -> int:
        """Bytes that the disk has left for this user."""
        found = os.fstatvfs(self.descriptor)
        return int(found.f_bavail * found.f_frsize)

    def shrink(self) -> None:
        """Give all room back that was reserved; what was there is gone."""
        with contextlib.suppress(OSError):  # then it stays reserved on the disk, and is used again
            os.ftruncate(self.descriptor, 0)
        self.nbytes = 0

    def write(self, memory: memoryview, offset: int) -> None:
        """Write all of *memory* from *offset* on.

        Raises:
            OSError: it cannot be written.
        """
        done = 0
        while done < len(memory):
            count = self._calls.write(self.descriptor, [memory[done:]], offset + done)
            done = _next_page(done, count, len(memory))
        if not self.is_direct:
            os.fdatasync(self.descriptor)
            drop_pages(self.descriptor, offset, len(memory))

    def read(self, memory: memoryview, offset: int) -> None:
        """Fill *memory* with the bytes from *offset* on.

        Raises:
            OSError: they cannot be read.
        """
        done = 0
        while done < len(memory):
            count = self._calls.read(self.descriptor, [memory[done:]], offset + done)
            done = _next_page(done, count, len(memory))
        if not self.is_direct:
            drop_pages(self.descriptor, offset, len(memory))

    def close(self) -> None:
        """Give the file's room back."""
        self._close()


def _next_page(done: int, count: int, nbytes: int) -> int:
    """Return where to go on after *count* bytes from *done* on: direct calls begin at whole pages.

    Raises:
        OSError: less than a page was transferred.
    """
    if done + count >= nbytes:
        return nbytes
    whole = (done + count) // PAGE_BYTES * PAGE_BYTES
    if whole <= done:
        raise OSError(errno.EIO, "the disk transferred less than a page")
    return whole


def _open_nameless(path: Path) -> tuple[int, bool]:
    """Make the file at *path*, and remove its name; return it, and whether it is direct."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    is_direct = True
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as cause:
        if not has_no_direct_reads(cause):
            raise
        is_direct = False
        with contextlib.suppress(FileNotFoundError):  # some make the file before they refuse
            path.unlink()
        descriptor = os.open(path, flags, 0o600)
    try:
        with contextlib.suppress(OSError):  # taken for a leftover just now: its name goes anyway
            lock_if_free(descriptor)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, is_direct
