"""How much host memory one process takes if the configuration does not say."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hf_pyao.engine.stores.host_memory import available_host_bytes

SHARE = 0.5
"""Share of the available host memory that the saved tensors of all processes take by default."""

RESERVE = 0.25
"""Share of it that is left to others in any case: several models of a process, each with its own
share, may together take more than :data:`SHARE`."""

LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",  # torchrun, accelerate
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # Open MPI
    "MPI_LOCALNRANKS",  # MPICH, Intel MPI
    "MV2_COMM_WORLD_LOCAL_SIZE",  # MVAPICH
    "LOCAL_SIZE",  # DeepSpeed's launcher
)
"""Variables in which launchers say how many processes run on this node, the nearest first."""

SLURM_SIZES = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
"""Variables in which Slurm says it: of the step, of the job, as asked for. A value is a number, or
a list such as ``8(x2),4``: eight on each of two nodes, four on the third."""


def ranks_of_node(environ: Mapping[str, str]) -> tuple[int, str | None]:
    """Return how many processes of this job run on this node, and the variable that says so.

    Values that are no positive numbers are passed over; 1 and None where nothing says it.
    """
    for name in LOCAL_SIZES:
        value = environ.get(name, "").strip()
        if re.fullmatch(r"[0-9]{1,9}", value) and int(value) > 0:
            return int(value), name
    for name in SLURM_SIZES:
        num_tasks = _slurm_tasks(environ.get(name, ""), environ.get("SLURM_NODEID", ""))
        if num_tasks:
            return num_tasks, name
    return 1, None


def _slurm_tasks(value: str, node_id: str) -> int:
    """Return the tasks of this node in Slurm's list: the most of any if it is not known which one.

    0 if it is no such list.
    """
    parts = [re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part) for part in value.split(",")]
    counts = [(int(part[1]), int(part[2] or 1)) for part in parts if part]
    if len(counts) != len(parts):
        return 0
    first = 0
    for num_tasks, num_nodes in counts:
        if re.fullmatch(r"[0-9]{1,9}", node_id) and first <= int(node_id) < first + num_nodes:
            return num_tasks
        first += num_nodes
    return max(num_tasks for num_tasks, _ in counts)


@dataclass(frozen=True)
class HostShare:
    """A process's share of the host memory, and how it came about."""

    capacity_bytes: int
    """The share as it was at the beginning."""
    available_bytes: int
    """Host memory that was available then."""
    num_ranks: int
    """Processes of this node that share it."""
    counted_by: str | None
    """The environment variable that says how many; None if nothing does."""
    _look: Callable[[], int]

    @classmethod
    def of_this_process(
        cls, environ: Mapping[str, str], look: Callable[[], int] = available_host_bytes
    ) -> HostShare:
        """Return the share of a process with this environment.

        Args:
            environ: the process's environment variables.
            look: returns the host memory available now, in bytes.
        """
        num_ranks, counted_by = ranks_of_node(environ)
        available_bytes = look()
        capacity_bytes = int(available_bytes * SHARE / num_ranks)
        return cls(capacity_bytes, available_bytes, num_ranks, counted_by, look)

    def limit_bytes(self, pool_bytes: int) -> int:
        """Return what the share is now, to a pool that has reserved *pool_bytes* of it already.

        Never more than at the beginning, and less where others have taken memory since (another
        model's pool, an optimizer on the host) and :data:`RESERVE` would not be left.
        """
        spare_bytes = self._look() - int(self.available_bytes * RESERVE)
        return min(self.capacity_bytes, pool_bytes + max(0, spare_bytes))

    def describe(self) -> str:
        """Say how the share came about."""
        text = f"half of the {self.available_bytes / 2**30:.1f} GiB available"
        if self.counted_by is None:
            return text
        return f"{text}, shared by {self.num_ranks} ranks of this node ({self.counted_by})"


def host_limit_bytes(host_memory_gib: float | None) -> int:
    """Return *host_memory_gib* in bytes; None stands for this process's share of the host."""
    if host_memory_gib is None:
        return HostShare.of_this_process(os.environ).capacity_bytes
    return int(host_memory_gib * 2**30)
