"""Files below the host's memory: a private folder, locks, and reads that bypass the page cache.

Everything lies in one folder of the user's, which only this user may enter (mode 0700; files have
mode 0600). A file is written under a name that ends in ``.part``, while its writer holds a lock on
it, and is then renamed. The kernel drops the lock when the writer ends, however it ends. So a
``.part`` file that can be locked was left by a killed run, and one that cannot be is being written.
Links are never followed inside of the folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from hf_pyao.errors import ConfigError, DiskError
from hf_pyao.text import echo, one_line

if sys.platform != "win32":  # which has no such module; no folder is used there
    import fcntl

PAGE_BYTES = 4096
"""What offsets, lengths and addresses of direct reads are multiples of."""

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
"""File systems that keep their files in the host's memory."""

PART = ".part"
"""Ending of files that are being written."""

_NO_DIRECT_READS = (errno.EINVAL, errno.EOPNOTSUPP)


def disk_error(action: str, path: Path, cause: OSError | str, remedy: str) -> DiskError:
    """Return the error for *path*, where *action* failed. It has the whole path, however long."""
    reason = cause if isinstance(cause, str) else cause.strerror or repr(cause)
    return DiskError(f"cannot {action} '{one_line(str(path))}': {reason}. {remedy}")


def private_folder(path: str | os.PathLike[str], label: str) -> Path:
    """Return the folder in *path* that only this user may enter; make it if it is not there.

    Args:
        path: a folder on a disk, the user's choice; made with mode 0700 if it is not there.
        label: how messages call the setting.

    Raises:
        ConfigError: *path* is in memory (tmpfs), is no folder, cannot be written to, or what is
            there in the folder's name is a link or another user's; or the system is not Linux.
    """
    if sys.platform != "linux":
        raise ConfigError(
            f"{label} is {echo(os.fspath(path))}, and this system is {sys.platform}; expected "
            "Linux, whose direct reads, locks and files without a name a disk needs. Set it to "
            "None.",
            key="disk-folder",
        )
    root = Path(path).expanduser().absolute()
    folder = root / f"pyao-{os.getuid()}"
    remedy = f"Give {label} a folder on a disk that you may write to."
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (kind := file_system_of(root)) in MEMORY_FILE_SYSTEMS:
            raise ConfigError(
                f"{label} is {echo(str(root))}, which is on {kind}: its files are in the host's "
                f"memory. {remedy}",
                key="disk-folder",
            )
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(
                f"{echo(str(folder))} is a link, no folder, or another user's; expected a folder "
                f"of your own. Remove it, or give {label} another folder.",
                key="disk-folder",
            )
        if stat.S_IMODE(found.st_mode) != 0o700:
            folder.chmod(0o700)
        if not os.access(folder, os.W_OK | os.X_OK) or _is_read_only(folder):
            raise ConfigError(
                f"{echo(str(folder))} cannot be written to. {remedy}", key="disk-folder"
            )
    except OSError as cause:
        reason = cause.strerror or repr(cause)
        raise ConfigError(
            f"cannot use {echo(str(folder))} for {label}: {reason}. {remedy}", key="disk-folder"
        ) from cause
    return folder


def _is_read_only(folder: Path) -> bool:
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system that *path* is on, such as ``ext4``; empty: not known.

    Args:
        path: an existing file or folder.
        mounts: the kernel's list of mounts; tests pass one of their own.
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    wanted = path.resolve()
    longest, kind = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        # Octal escapes stand for blanks: proc(5), mountinfo.
        point = Path(fields[4].encode().decode("unicode_escape"))
        if wanted.is_relative_to(point) and len(point.parts) >= longest:
            longest, kind = len(point.parts), after.split()[0]
    return kind


def open_to_read(path: Path, *, direct: bool) -> int:
    """Open *path*, which must be a plain file and no link.

    Returns:
        A descriptor; with *direct*, reads bypass the page cache (O_DIRECT).

    Raises:
        OSError: it cannot be opened; ``EINVAL`` where the file system has no direct reads.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no plain file")
    return descriptor


def has_no_direct_reads(cause: OSError) -> bool:
    """Say whether *cause* is a file system's answer that it has no direct reads."""
    return cause.errno in _NO_DIRECT_READS


def is_direct(descriptor: int) -> bool:
    """Say whether reads of *descriptor* bypass the page cache, by the kernel's own flags."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@contextlib.contextmanager
def being_written(path: Path) -> Iterator[int]:
    """Hold the lock on the ``.part`` file of *path*; wait while another process writes it.

    Whoever has waited looks whether *path* is there by now. On leaving, a part that was not renamed
    is removed.

    Yields:
        The part's descriptor, open for writing; the part is empty.

    Raises:
        OSError: it cannot be made.
    """
    part = part_of(path)
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(part, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is_at(descriptor, part):
                continue  # renamed or removed by whoever had the lock: this is another file now
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, 0)
            try:
                yield descriptor
            finally:
                if _is_at(descriptor, part):
                    with contextlib.suppress(OSError):
                        part.unlink()
            return
        finally:
            os.close(descriptor)


def lock_if_free(descriptor: int) -> None:
    """Lock the file, until it is closed.

    Raises:
        OSError: another process has locked it.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def part_of(path: Path) -> Path:
    """Return the name under which *path* is written."""
    return path.with_name(path.name + PART)


def remove_leftovers(folder: Path) -> int:
    """Remove the parts that killed runs have left in *folder*; return how many.

    Parts that a live process writes are locked, and stay. Other files, and links, stay too.
    """
    num_removed = 0
    for part in folder.glob(f"*{PART}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                lock_if_free(descriptor)
                if stat.S_ISREG(os.fstat(descriptor).st_mode) and _is_at(descriptor, part):
                    part.unlink()
                    num_removed += 1
            finally:
                os.close(descriptor)
    return num_removed


def write_all(descriptor: int, content: memoryview) -> None:
    """Write all of *content*; the kernel may take it in several pieces.

    Raises:
        OSError: it cannot be written.
    """
    while content:
        content = content[os.write(descriptor, content) :]


def drop_pages(descriptor: int, offset: int = 0, nbytes: int = 0) -> None:
    """Let the page cache drop what it has of a file; 0 bytes: all up to its end."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _is_at(descriptor: int, path: Path) -> bool:
    """Say whether *path* still is the open file."""
    try:
        there = path.lstat()
    except OSError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
