"""How much host memory there is to take."""

from __future__ import annotations

import os
from pathlib import Path


def available_host_bytes() -> int:
    """Return the host memory that this process could still take, container limits respected.

    The smaller of what the system calls available and what is left under the control group's
    limit (Linux); half of the physical memory where neither is known.
    """
    candidates = [value for value in (_meminfo_bytes(), _cgroup_bytes()) if value is not None]
    if candidates:
        return min(candidates)
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 * 2**30


def _meminfo_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_bytes() -> int | None:
    for limit_name, usage_name in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            limit = Path(limit_name).read_text(encoding="ascii").strip()
            usage = Path(usage_name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if limit.isdigit() and usage.isdigit():
            return max(0, int(limit) - int(usage))
    return None
