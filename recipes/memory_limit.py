"""A child process under a memory limit of the kernel's, and what that counts of it (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""The environment of a process whose resident memory is looked at. Before release 2.38 the C
library's heap does not use a freed aligned block again for one of the same size (glibc bug 14581),
and torch's blocks are aligned: what was let go would stay resident. With this, larger blocks go
back to the system at once."""

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


@dataclass
class Limited:
    """A cgroup of our own."""

    path: Path
    is_v2: bool

    def peak_bytes(self) -> int | None:
        """Return the most that the kernel has charged to it, page cache included."""
        name = "memory.peak" if self.is_v2 else "memory.max_usage_in_bytes"
        return _number(self.path / name)

    def num_killed(self) -> int | None:
        """Return how many of its processes the kernel has killed for memory."""
        name = "memory.events" if self.is_v2 else "memory.oom_control"
        text = _text(self.path / name)
        words = dict(line.split()[:2] for line in text.splitlines() if len(line.split()) == 2)
        return int(words["oom_kill"]) if "oom_kill" in words else None


@contextlib.contextmanager
def limited_to(nbytes: int) -> Iterator[Limited | None]:
    """Yield a new cgroup of *nbytes*; None where none can be made."""
    group = _make(nbytes)
    try:
        yield group
    finally:
        if group is not None:
            for _ in range(50):  # its processes end a little later
                with contextlib.suppress(OSError):
                    group.path.rmdir()
                    break
                time.sleep(0.1)


def run_in(group: Limited | None, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run *command* in *group*, and return what it printed."""

    def enter() -> None:
        if group is not None:
            (group.path / "cgroup.procs").write_text(str(os.getpid()))

    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, preexec_fn=enter)


def status_bytes(name: str) -> int:
    """Return what the kernel says of this process: its resident memory (``VmRSS``), the most of it
    so far (``VmHWM``), its own part (``RssAnon``), pages of mapped files (``RssFile``); 0 if it
    does not."""
    for line in _text(Path("/proc/self/status")).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def resident_bytes_from_here_on() -> int:
    """Return this process's resident memory; ``VmHWM`` counts the most from here on."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def cached_bytes(path: Path) -> int:
    """Return the bytes of a file that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    mincore: Callable[..., int] = libc.mincore
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return 0
        # Private and writable, since ctypes takes the address of writable memory alone.
        mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)
        first = ctypes.c_char.from_buffer(mapped)
        pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
        mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages)
        del first
        mapped.close()
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def drop_from_cache(path: Path) -> None:
    """Let the page cache drop a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _make(nbytes: int) -> Limited | None:
    name = f"hf_pyao-{os.getpid()}"
    for root, file, is_v2 in (
        (V1, "memory.limit_in_bytes", False),
        (V2, "memory.max", True),
    ):
        path = root / name
        try:
            path.mkdir()
        except OSError:
            continue
        try:
            (path / file).write_text(str(nbytes))
            return Limited(path, is_v2)
        except OSError:
            with contextlib.suppress(OSError):
                path.rmdir()
    return None


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
