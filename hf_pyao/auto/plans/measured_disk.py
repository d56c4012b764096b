"""The disk below the host, as plans see it: its speeds are those that this run has measured."""

from __future__ import annotations

from hf_pyao.engine.stores.store import Store
from hf_pyao.engine.transfer.tiers import Tiers
from hf_pyao.plan.hardware.speeds import DiskModel


class DiskBelow:
    """Disks among the tiers of a link.

    While nothing was written and read yet, their speeds are not known, and no plan uses them: the
    micro-batches that are measured offload everything, so that they are known by the first plan
    wherever the host is too small.

    Args:
        tiers: of the link.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._hosts = [store for store in tiers.stores if store.is_host_memory]
        self._disks: list[Store] = [store for store in tiers.stores if not store.is_host_memory]

    @classmethod
    def of(cls, tiers: Tiers) -> DiskBelow | None:
        """Return the disks among *tiers*; None if there is none."""
        found = cls(tiers)
        return found if found._disks else None

    @property
    def capacity_bytes(self) -> int:
        """Most bytes on them."""
        return sum(disk.capacity_bytes for disk in self._disks)

    @property
    def host_bytes(self) -> int:
        """Most bytes in the host's memory."""
        return sum(host.capacity_bytes for host in self._hosts)

    def model(self) -> DiskModel | None:
        """Return the speeds; None while they are not known."""
        speeds = [disk.speeds() for disk in self._disks]
        known = [speed for speed in speeds if speed is not None]
        if not known:
            return None
        return DiskModel(
            write_gib_per_s=min(write for write, _ in known),
            read_gib_per_s=min(read for _, read in known),
            host_bytes=self.host_bytes,
        )
