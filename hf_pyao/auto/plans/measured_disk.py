"""The disk below the host, as plans see it: its speeds are those that this run has measured."""

from __future__ import annotations

import math
from typing import Protocol

from hf_pyao.engine.stores.store import Store
from hf_pyao.engine.transfer.tiers import Tiers
from hf_pyao.plan.hardware.speeds import DiskModel
from hf_pyao.plan.step.disk_share import PlacedWeights


class PlacesWeights(Protocol):
    """What streams weights, as far as a disk is concerned."""

    @property
    def has_disk(self) -> bool:
        """Whether weights may lie on a disk."""
        ...

    @property
    def placed_on_disk(self) -> PlacedWeights | None:
        """The layers that lie on the disk; None: none do."""
        ...

    @property
    def disk_read_gib_per_s(self) -> float | None:
        """Speed at which they were read; None: they were not."""
        ...


class DiskBelow:
    """Disks among the tiers of a link, and that of streamed weights.

    While nothing was written and read yet, their speeds are not known, and no plan uses them: the
    micro-batches that are measured offload everything and read the weights, so that they are known
    by the first plan wherever the host is too small.

    Args:
        tiers: of the link.
        weights: what streams weights; None: nothing.
    """

    def __init__(self, tiers: Tiers, weights: PlacesWeights | None = None) -> None:
        self._hosts = [store for store in tiers.stores if store.is_host_memory]
        self._disks: list[Store] = [store for store in tiers.stores if not store.is_host_memory]
        self._weights = weights

    @classmethod
    def of(cls, tiers: Tiers, weights: PlacesWeights | None = None) -> DiskBelow | None:
        """Return the disks among *tiers*, and that of *weights*; None if there is none."""
        found = cls(tiers, weights)
        return found if found._disks or (weights is not None and weights.has_disk) else None

    @property
    def capacity_bytes(self) -> int:
        """Most bytes of saved tensors on them."""
        return sum(disk.capacity_bytes for disk in self._disks)

    @property
    def host_bytes(self) -> int:
        """Most bytes in the host's memory."""
        return sum(host.capacity_bytes for host in self._hosts)

    @property
    def placed_weights(self) -> PlacedWeights | None:
        """The streamed weights that lie on a disk; None: none do."""
        return None if self._weights is None else self._weights.placed_on_disk

    def model(self) -> DiskModel | None:
        """Return the speeds; None while they are not known."""
        speeds = [disk.speeds() for disk in self._disks]
        known = [speed for speed in speeds if speed is not None]
        of_weights = None if self._weights is None else self._weights.disk_read_gib_per_s
        reads = [read for _, read in known] + ([] if of_weights is None else [of_weights])
        if not reads:
            return None
        return DiskModel(
            write_gib_per_s=min((write for write, _ in known), default=None),
            read_gib_per_s=min(reads),
            host_bytes=self.host_bytes if known else math.inf,
        )
