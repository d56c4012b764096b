"""What the control groups of this process leave of the host's memory (Linux)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""Entries of ``memory.stat`` that the kernel gives up before a group meets its limit; the same that
it counts in ``MemAvailable``. Pages of tmpfs are not among them: the kernel counts those under
``file``, and keeps them on the lists of anonymous memory."""

NOT_YET_RECLAIMABLE = {2: ("file_dirty", "file_writeback"), 1: ("dirty", "writeback")}
"""Entries, by version, of pages that must be written to a disk first."""

USUAL_MOUNTS = {(2, "/sys/fs/cgroup"): "/", (1, "/sys/fs/cgroup/memory"): "/"}
"""Where a tree of each version lies as a rule, by (version, mount point), and the group that is
mounted there: some sandboxes list no mounts."""


@dataclass(frozen=True)
class Hierarchy:
    """A tree of control groups, as this process sees it."""

    version: int
    """1 or 2."""
    mount_point: PurePosixPath
    mount_root: tuple[str, ...]
    """Which group is mounted there: its path in the tree."""
    own_group: tuple[str, ...]
    """The group that this process is in: its path in the tree."""

    def groups(self) -> Iterator[PurePosixPath]:
        """Yield where the process's own group and all groups above it would lie in the file system.

        A group that is not mounted (in a container whose own group is all that is to be seen, or
        from another namespace, where the path begins with ``..``) is not there to be read; what
        is above it may be, the mount point at the latest.
        """
        root, own = self.mount_root, self.own_group
        below = own[len(root) :] if own[: len(root)] == root else own
        if ".." in below or (below == own and ".." in root):
            below = ()
        for depth in range(len(below), -1, -1):
            yield self.mount_point.joinpath(*below[:depth])


def cgroup_available_bytes(root: Path = Path("/")) -> int | None:
    """Return what the control groups leave this process; None if none of them has a limit.

    The least of (limit - usage + what can be reclaimed) over the process's own group and all above
    it, since a job's limit is often on a group far below the root. ``memory.high`` counts as a
    limit like ``memory.max``: beyond it the kernel slows the process down. Limits on swap do not
    count.

    Args:
        root: where the file system begins; tests pass one of their own.
    """
    left = [
        available
        for hierarchy in _hierarchies(root)
        for group in hierarchy.groups()
        if (available := _left_in(_under(root, group), hierarchy.version)) is not None
    ]
    return min(left, default=None)


def _left_in(group: Path, version: int) -> int | None:
    """Return the bytes left in one group; None if it has no limit, or cannot be read."""
    if version == 2:
        limits = [_number(group / "memory.max"), _number(group / "memory.high")]
        usage = _number(group / "memory.current")
    else:
        limits = [_number(group / "memory.limit_in_bytes")]
        usage = _number(group / "memory.usage_in_bytes")
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is None or usage is None:
        return None
    in_use = max(0, usage - _reclaimable_bytes(group, version))
    return max(0, limit - in_use)


def _reclaimable_bytes(group: Path, version: int) -> int:
    stat = {}
    for line in _read(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            stat[name] = int(value)
    # Version 1 counts the groups below only under names of their own; its usage counts them.
    prefix = "total_" if version == 1 else ""
    total = sum(stat.get(prefix + name, 0) for name in RECLAIMABLE)
    return max(0, total - sum(stat.get(prefix + name, 0) for name in NOT_YET_RECLAIMABLE[version]))


def _hierarchies(root: Path) -> Iterator[Hierarchy]:
    """Yield the trees that may govern memory: version 2, version 1, or both side by side."""
    own = _own_groups(root)
    for (version, mount_point), mount_root in {**USUAL_MOUNTS, **_mounts(root)}.items():
        yield Hierarchy(
            version,
            PurePosixPath(mount_point),
            _parts(mount_root),
            _parts(own.get(version, "/")),
        )


def _own_groups(root: Path) -> dict[int, str]:
    """Return the process's group in the tree of each version that has one."""
    groups = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            groups[2] = path
        elif "memory" in controllers.split(","):
            groups[1] = path
    return groups


def _mounts(root: Path) -> dict[tuple[int, str], str]:
    """Return the trees that may govern memory: by version and mount point the group mounted there.

    Of two mounts at one place the later one hides the earlier.
    """
    mounts = {}
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        place, kind = before.split(" "), after.split(" ")
        if len(place) < 5 or len(kind) < 3:
            continue
        mount_root, mount_point = (_unescape(text) for text in place[3:5])
        if kind[0] == "cgroup2":
            mounts[2, mount_point] = mount_root
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            mounts[1, mount_point] = mount_root
    return mounts


def _unescape(text: str) -> str:
    r"""Undo the octal escapes of mountinfo: a blank is ``\040`` there."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split("/") if part)


def _under(root: Path, path: PurePosixPath) -> Path:
    return root.joinpath(*path.parts[1:])


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    """Return a file's text, or nothing where there is none to read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
