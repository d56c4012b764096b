"""The memory below the device, as plans see it: what stores have now, and speeds of this run.

Host memory changes in a run. Another model's weights take some, a share of the host shrinks, and
this model's streamed weights come and go. Each plan reads it anew.
"""

from __future__ import annotations

import math

from hf_pyao.auto.install.weight_memory import WeightMemory
from hf_pyao.engine.stores.store import Store
from hf_pyao.engine.transfer.tiers import Tiers
from hf_pyao.plan.hardware.speeds import DiskModel
from hf_pyao.plan.step.disk_share import DiskShare


class MeasuredHostAndDisk:
    """The tiers of a link, and the disk of streamed weights.

    While nothing was written and read yet, the speeds of disks are not known, and no plan uses
    them: the micro-batches that are measured offload everything and read the weights, so that they
    are known by the first plan wherever the host is too small.

    Args:
        tiers: of the link.
        weights: what streams the model's weights; None: nothing.
    """

    def __init__(self, tiers: Tiers, weights: WeightMemory | None = None) -> None:
        self._hosts = [store for store in tiers.stores if store.is_host_memory]
        self._disks: list[Store] = [store for store in tiers.stores if not store.is_host_memory]
        self._weights = weights

    @property
    def has_disk(self) -> bool:
        """Whether there is a disk, for saved tensors or for weights."""
        return bool(self._disks) or (self._weights is not None and self._weights.disk.is_given)

    @property
    def host_bytes(self) -> int:
        """Host memory that saved tensors and the streamed weights of layers may take together."""
        taken = 0 if self._weights is None else self._weights.taken_bytes
        return sum(host.capacity_bytes for host in self._hosts) + taken

    @property
    def disk_bytes(self) -> int:
        """Most bytes of saved tensors on disks."""
        return sum(disk.capacity_bytes for disk in self._disks)

    @property
    def placed_weights(self) -> DiskShare | None:
        """The streamed weights that lie on a disk; None: none do."""
        return None if self._weights is None else self._weights.disk.placed

    def disk(self) -> DiskModel | None:
        """Return the speeds of disks; None while they are not known."""
        speeds = [disk.speeds() for disk in self._disks]
        known = [speed for speed in speeds if speed is not None]
        of_weights = None if self._weights is None else self._weights.disk.read_gib_per_s
        reads = [read for _, read in known] + ([] if of_weights is None else [of_weights])
        if not reads:
            return None
        return DiskModel(
            write_gib_per_s=min((write for write, _ in known), default=None),
            read_gib_per_s=min(reads),
            host_bytes=self.host_bytes if known else math.inf,
        )
