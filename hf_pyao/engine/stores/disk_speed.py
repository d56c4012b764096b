"""How fast a disk is, both ways, measured with the requests that hf_pyao makes of it."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from hf_pyao.engine.stores.disk_files import (
    PAGE_BYTES,
    disk_error,
    drop_pages,
    has_no_direct_reads,
    private_folder,
)
from hf_pyao.engine.stores.disk_reader import NUM_READERS, RANGE_BYTES
from hf_pyao.engine.stores.raw_bytes import raw_bytes

SAMPLE_BYTES = 2**30
"""Bytes that are written and read for a measurement."""

_REMEDY = "Make room, or give another folder."


@dataclass(frozen=True, kw_only=True)
class DiskSpeed:
    """Speeds of a disk in GiB/s (2**30 bytes), past the page cache."""

    read_gib_per_s: float
    write_gib_per_s: float
    is_direct: bool
    """Whether requests bypassed the page cache; if not, its pages were dropped before reads."""
    nbytes: int
    """Bytes of the sample, each way."""


def measure_disk(
    path: str | os.PathLike[str], label: str = "the folder", nbytes: int = SAMPLE_BYTES
) -> DiskSpeed:
    """Write and read a file in *path*, and remove it.

    Four threads have a request of 8 MiB each under way (``O_DIRECT``). The file has random bytes,
    is written in whole, flushed, and dropped from the page cache before it is read. What a drive or
    a hypervisor keeps in a cache of its own cannot be evicted.

    Args:
        path: a folder on the disk.
        label: how messages call it.
        nbytes: of the file; rounded up to whole requests.

    Raises:
        ConfigError: the folder cannot be used, or is in memory.
        DiskError: the file cannot be written or read.
    """
    folder = private_folder(path, label)
    requests = range(0, nbytes, RANGE_BYTES)
    buffers = [_aligned(RANGE_BYTES) for _ in range(NUM_READERS)]
    noise = raw_bytes(buffers[0])
    for first in range(0, RANGE_BYTES, 2**20):
        noise[first : first + 2**20] = os.urandom(2**20)
    for other in buffers[1:]:
        other.copy_(buffers[0])
    descriptor = -1
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="speed-", suffix=".part") as file:
            descriptor, is_direct = _open(file.name)
            os.posix_fallocate(descriptor, 0, len(requests) * RANGE_BYTES)

            def write(number: int, at: int) -> None:
                done = 0
                while done < RANGE_BYTES:
                    memory = raw_bytes(buffers[number])[done:]
                    done += os.pwritev(descriptor, [memory], at + done)

            def flush() -> None:
                os.fsync(descriptor)

            write_s = _timed(write, requests, flush)
            drop_pages(descriptor)
            read_s = _timed(_reader(descriptor, buffers), requests)
            os.close(descriptor)
            descriptor = -1
    except OSError as cause:
        raise disk_error("measure the speed of", folder, cause, _REMEDY) from cause
    finally:
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    gib = len(requests) * RANGE_BYTES / 2**30
    return DiskSpeed(
        read_gib_per_s=gib / read_s,
        write_gib_per_s=gib / write_s,
        is_direct=is_direct,
        nbytes=len(requests) * RANGE_BYTES,
    )


def measure_reads(path: str | os.PathLike[str], most_bytes: int = SAMPLE_BYTES) -> float:
    """Read a file that is there as :func:`measure_disk` reads its own; return GiB/s.

    Args:
        path: a file of 8 MiB or more.
        most_bytes: so much of it is read at most, from its first byte on, in whole requests.

    Raises:
        OSError: it cannot be read.
    """
    descriptor, _ = _open(os.fspath(path), os.O_RDONLY)
    try:
        nbytes = min(most_bytes, os.fstat(descriptor).st_size) // RANGE_BYTES * RANGE_BYTES
        drop_pages(descriptor)
        buffers = [_aligned(RANGE_BYTES) for _ in range(NUM_READERS)]
        read_s = _timed(_reader(descriptor, buffers), range(0, nbytes, RANGE_BYTES))
        return nbytes / 2**30 / read_s
    finally:
        os.close(descriptor)


def _reader(descriptor: int, buffers: list[torch.Tensor]) -> Callable[[int, int], None]:
    """Return what has thread *number* read a request into its buffer."""

    def read(number: int, at: int) -> None:
        done = 0
        while done < RANGE_BYTES:
            got = os.preadv(descriptor, [raw_bytes(buffers[number])[done:]], at + done)
            if not got:
                raise OSError(None, f"it ends at byte {at + done}")
            done += got

    return read


def _open(path: str, access: int = os.O_RDWR) -> tuple[int, bool]:
    """Open *path* for requests past the page cache; say whether the file system has them."""
    flags = access | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT), True
    except OSError as cause:
        if not has_no_direct_reads(cause):
            raise
    return os.open(path, flags), False


def _timed(
    request: Callable[[int, int], None], firsts: range, then: Callable[[], None] = lambda: None
) -> float:
    """Run *request* for the bytes at *firsts* on four threads; return the seconds that it took."""
    began = time.perf_counter()
    with ThreadPoolExecutor(NUM_READERS, "pyao-disk-speed") as threads:

        def own_share(number: int) -> None:
            for at in firsts[number::NUM_READERS]:
                request(number, at)

        for done in [threads.submit(own_share, number) for number in range(NUM_READERS)]:
            done.result()
    then()
    return time.perf_counter() - began


def _aligned(nbytes: int) -> torch.Tensor:
    memory = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8)
    first = -memory.data_ptr() % PAGE_BYTES
    return memory[first : first + nbytes]
