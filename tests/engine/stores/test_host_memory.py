"""What host memory there is, read from file systems that are written for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from hf_pyao.engine.stores import available_host_bytes
from hf_pyao.engine.stores.cgroup import cgroup_available_bytes

V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
MEMINFO = {
    "proc/meminfo": "MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:    4000000 kB\nCached: 7 kB\n"
}


def group2(place: str, limit: object, usage: int, stat: str = "", **more: object) -> dict[str, str]:
    """The files of a group of version 2."""
    values = {"max": limit, "current": usage, "stat": stat, **more}
    return {f"{place}/memory.{name}": f"{value}\n" for name, value in values.items()}


def group1(place: str, limit: int, usage: int, stat: str = "") -> dict[str, str]:
    """The files of a group of version 1."""
    values = {"limit_in_bytes": limit, "usage_in_bytes": usage, "stat": stat}
    return {f"{place}/memory.{name}": f"{value}\n" for name, value in values.items()}


def own_group(text: str) -> dict[str, str]:
    return {"proc/self/cgroup": text}


def mounts(*lines: str) -> dict[str, str]:
    others = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\nno mount\n"
    return {"proc/self/mountinfo": others + "\n".join(lines) + "\n"}


def mount2(place: str = "/" + V2, of: str = "/") -> str:
    return f"31 22 0:27 {of} {place} rw,nosuid shared:9 master:3 - cgroup2 cgroup2 rw,nsdelegate"


def mount1(place: str = "/" + V1, of: str = "/", controllers: str = "memory") -> str:
    return f"35 31 0:31 {of} {place} rw,relatime - cgroup cgroup rw,{controllers}"


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MEMINFO, 4_000_000 * 1024),
        ({**MEMINFO, **group2(V2, "max", 1)}, 4_000_000 * 1024),
        ({**MEMINFO, **group2(V2, 1000, 300)}, 700),
        ({**MEMINFO, **group2(V2, 10, 30)}, 0),
        ({**MEMINFO, **group1(V1, 900, 100)}, 800),
        (group2(V2, 1000, 300), 700),
        ({"proc/meminfo": "MemAvailable: many\n", **group2(V2, 1000, 300)}, 700),
    ],
)
def test_available_memory_is_the_smaller_of_the_machines_and_the_containers(
    files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert available_host_bytes(write(tmp_path, files)) == expected


def test_available_memory_where_nothing_is_known(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path) > 2**28
    assert cgroup_available_bytes(tmp_path) is None


GROUPS: dict[str, tuple[dict[str, str], int | None]] = {
    "version 2, the job's own group": (
        {
            **own_group("0::/system.slice/slurmstepd.scope/job_1/step_0\n"),
            **mounts(mount2()),
            **group2(f"{V2}/system.slice/slurmstepd.scope/job_1", 2000, 500),
            **group2(f"{V2}/system.slice/slurmstepd.scope/job_1/step_0", "max", 500),
        },
        1500,
    ),
    "a group above has less left than the own one": (
        {
            **own_group("0::/a/b\n"),
            **mounts(mount2()),
            **group2(f"{V2}/a", 5000, 4900),
            **group2(f"{V2}/a/b", 2000, 1000),
        },
        100,
    ),
    "version 1": (
        {
            **own_group("7:cpu,cpuacct:/x\n4:hugetlb,memory:/slurm/uid_7/job_1\n1:name=s:/y\n"),
            **mounts(mount1(controllers="hugetlb,memory")),
            **group1(V1, 2**63 - 4096, 999),
            **group1(f"{V1}/slurm/uid_7/job_1", 3000, 700),
            **group1(f"{V1}/x", 1, 1),
        },
        2300,
    ),
    "both, memory under version 1": (
        {
            **own_group("4:memory:/job\n0::/job\n"),
            **mounts(mount2(f"/{V2}/unified"), mount1()),
            **group1(f"{V1}/job", 3000, 1000),
        },
        2000,
    ),
    "both, memory under version 2": (
        {
            **own_group("4:cpu:/job\n0::/job\n"),
            **mounts(mount2(f"/{V2}/unified"), mount1(f"/{V2}/cpu", controllers="cpu")),
            **group2(f"{V2}/unified/job", 3000, 1000),
        },
        2000,
    ),
    "a container's group, mounted, with its path on the host": (
        {
            **own_group("0::/docker/abc/inner\n"),
            **mounts(mount2(of="/docker/abc")),
            **group2(V2, 3000, 1000),
            **group2(f"{V2}/inner", 2500, 1000),
        },
        1500,
    ),
    "a container's group, mounted, another path than in /proc": (
        {
            **own_group("4:memory:/kubepods/pod/abc\n"),
            **mounts(mount1(of="/docker/xyz")),
            **group1(V1, 3000, 1000),
        },
        2000,
    ),
    "moved out of the namespace's root": (
        {
            **own_group("0::/../other\n"),
            **mounts(mount2()),
            **group2(V2, 3000, 1000),
            **group2("sys/fs/other", 2, 1),
            **group2(f"{V2}/other", 2, 1),
        },
        2000,
    ),
    "the mount begins above the namespace's root": (
        {
            **own_group("0::/mine\n"),
            **mounts(mount2(of="/..")),
            **group2(V2, 3000, 1000),
            **group2(f"{V2}/mine", 2, 1),
        },
        2000,
    ),
    "mounted elsewhere, with a blank in its name; a path with a colon": (
        {
            **own_group("0::/a:b\n"),
            **mounts(mount2(r"/mnt/c\040group")),
            **group2("mnt/c group/a:b", 3000, 1000),
        },
        2000,
    ),
    "a later mount at the same place hides the earlier": (
        {
            **own_group("0::/docker/abc/inner\n"),
            **mounts(mount2(), mount2(of="/docker/abc")),
            **group2(f"{V2}/inner", 2500, 1000),
        },
        1500,
    ),
    "no list of mounts": (
        {**own_group("0::/job\n"), **group2(f"{V2}/job", 2000, 500)},
        1500,
    ),
    "memory.high below memory.max": (
        {**own_group("0::/\n"), **group2(V2, 3000, 1000, high=1800)},
        800,
    ),
    "memory.high alone": ({**own_group("0::/\n"), **group2(V2, "max", 1000, high=1800)}, 800),
    "no limit anywhere": ({**own_group("0::/a\n"), **group2(f"{V2}/a", "max", 7)}, None),
}


@pytest.mark.parametrize(("files", "expected"), GROUPS.values(), ids=list(GROUPS))
def test_the_group_with_the_least_left_counts(
    files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    assert cgroup_available_bytes(write(tmp_path, files)) == expected


STAT_2 = "anon 1000\nfile 6500\nshmem 500\ninactive_anon 1500\n" + (
    "inactive_file 4000\nactive_file 2000\nslab_reclaimable 300\nslab_unreclaimable 70\n"
)
STAT_1 = "cache 11\ninactive_file 5\nactive_file 6\ndirty 1\ntotal_cache 6500\n" + (
    "total_shmem 500\ntotal_inactive_file 4000\ntotal_active_file 2000\ntotal_dirty 100\n"
)


CACHES: dict[str, tuple[dict[str, str], int | None]] = {
    "cache is available; shared memory, unclaimable memory and processes are not": (
        group2(V2, 8000, 7900, STAT_2),
        100 + 6300,
    ),
    "what must be written first is not": (
        group2(V2, 8000, 7900, STAT_2 + "file_dirty 250\nfile_writeback 50\n"),
        100 + 6000,
    ),
    "of the group that has the least left then": (
        {
            **own_group("0::/a\n"),
            **group2(V2, 9000, 8500),
            **group2(f"{V2}/a", 8000, 7900, STAT_2),
        },
        500,
    ),
    "never more than the limit": (group2(V2, 8000, 100, STAT_2), 8000),
    "version 1 counts the groups below by other names": (
        group1(V1, 8000, 7900, STAT_1),
        100 + 5900,
    ),
    "lines of another form": (group2(V2, 8000, 7900, "inactive_file\nactive_file x\n\n"), 100),
}


@pytest.mark.parametrize(("files", "expected"), CACHES.values(), ids=list(CACHES))
def test_files_that_are_merely_cached_count_as_available(
    files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert cgroup_available_bytes(write(tmp_path, files)) == expected
