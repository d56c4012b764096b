"""Reserve host memory near the device, on machines with several NUMA nodes.

A copy between a device and memory of the far node crosses the processors' interconnect: on large
hosts that costs more than half of the bandwidth. Memory is placed on the node of the core that
reserves it, so the reserving thread is moved there for the moment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

SYSFS = Path("/sys")


def node_of_pci_device(address: str, sysfs: Path = SYSFS) -> int | None:
    """Return the NUMA node of a PCI device such as ``0000:3b:00.0``; None if the system is silent.

    A machine with one node says -1, which is None here.
    """
    try:
        text = (sysfs / "bus/pci/devices" / address.lower() / "numa_node").read_text("ascii")
    except OSError:
        return None
    node = int(text)
    return node if node >= 0 else None


def cores_of_node(node: int, sysfs: Path = SYSFS) -> frozenset[int]:
    """Return the cores of a NUMA node; empty if the system is silent."""
    try:
        text = (sysfs / f"devices/system/node/node{node}/cpulist").read_text("ascii")
    except OSError:
        return frozenset()
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


@contextlib.contextmanager
def running_near(node: int | None, sysfs: Path = SYSFS) -> Iterator[None]:
    """Run the body on cores of *node*, as far as this process may use them; then as before.

    Does nothing if *node* is None, the platform cannot pin threads, or none of its cores is ours.
    """
    if node is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    near = allowed & cores_of_node(node, sysfs)
    if not near or near == allowed:
        yield
        return
    os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
