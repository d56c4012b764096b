"""How much host memory there is to take."""

from __future__ import annotations

import os
from pathlib import Path

from hf_pyao.engine.stores.cgroup import cgroup_available_bytes


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the host memory that this process could still take, container limits respected.

    The smaller of what the system calls available and what is left under the limits of the
    process's control groups (Linux), where files that are merely cached count as available; half
    of the physical memory where neither is known.

    Args:
        root: where the file system begins; tests pass one of their own.
    """
    known = [
        value for value in (_meminfo_bytes(root), cgroup_available_bytes(root)) if value is not None
    ]
    if known:
        return min(known)
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 * 2**30


def _meminfo_bytes(root: Path) -> int | None:
    try:
        text = (root / "proc/meminfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            kib = value.split()[:1]
            return int(kib[0]) * 1024 if kib and kib[0].isdigit() else None
    return None
