"""The disk as the tier below the host's memory, by configuration."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_pyao.config import GIB, EffectiveConfig
from hf_pyao.engine.stores.host_share import ranks_of_node
from hf_pyao.engine.stores.slabs import SlabSource
from hf_pyao.engine.transfer.tiers import Tier
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.errors import warn
from hf_pyao.text import Labels

logger = logging.getLogger(__name__)

RESERVE_BYTES = 10 * GIB
"""What is left free on the disk where the configuration does not say how much to take."""


@dataclass(frozen=True, kw_only=True)
class DiskSettings:
    """Whether saved tensors may go to a disk, and how much."""

    path: str | None
    """A directory; None: no disk."""
    label: str
    """How messages call it."""
    gib: float | None
    """Most GiB on the disk; None: what is free, less a reserve."""
    write_limit_tb: float
    """Most TB that are written."""

    @classmethod
    def of(cls, config: EffectiveConfig, labels: Labels) -> DiskSettings:
        """Return what *config* says; messages call its fields by *labels*."""
        return cls(
            path=None if config.disk_path is None else os.fspath(config.disk_path),
            label=labels["disk_path"],
            gib=config.disk_gib,
            write_limit_tb=config.disk_write_limit,
        )

    @property
    def is_used(self) -> bool:
        """True if saved tensors may go to a disk."""
        return self.path is not None and self.gib != 0


def disk_tier(
    settings: DiskSettings, transport: Transport, numa_node: int | None = None
) -> Tier | None:
    """Return the disk as a tier; None if no saved tensors go to one.

    Args:
        settings: where, and how much.
        transport: copies between device and host.
        numa_node: node of the host's memory that the bytes pass through.

    Raises:
        ConfigError: the directory cannot be used.
        DiskError: no file can be made in it.
    """
    if not settings.is_used or settings.path is None:
        return None
    # Here: direct access, locks and nameless files are Linux's, and others train without them.
    from hf_pyao.engine.stores.disk_figures import TB, WriteLimit
    from hf_pyao.engine.stores.disk_files import PAGE_BYTES, private_folder
    from hf_pyao.engine.stores.disk_store import DiskStore
    from hf_pyao.engine.stores.nameless_file import NamelessFile
    from hf_pyao.engine.transfer.disk_transport import DiskTransport

    folder = private_folder(settings.path, settings.label)
    capacity_bytes, origin = _capacity(settings, folder)
    capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
    if not capacity_bytes or (settings.gib is not None and origin):
        warn(
            logger,
            "disk-full",
            "the disk of %s has room for %.2f GiB of saved tensors (%s). What finds no room there "
            "or on the host stays on the device. Make room, or give another disk_gib.",
            *(folder, capacity_bytes / GIB, origin),
        )
    if not capacity_bytes:
        return None
    source = SlabSource(pin=transport.needs_pinned_memory, numa_node=numa_node)

    def make_memory(nbytes: int) -> torch.Tensor:
        memory = source.reserve_exactly(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8) if memory is None else memory

    store = DiskStore(
        NamelessFile(folder),
        capacity_bytes,
        WriteLimit(int(settings.write_limit_tb * TB)),
        make_memory=make_memory,
        is_done=transport.is_done,
        await_copy=transport.await_on_host,
        reserve_bytes=RESERVE_BYTES if settings.gib is None else 0,
        limit_origin=origin,
    )
    return Tier(store, DiskTransport(transport, store))


def _capacity(settings: DiskSettings, folder: Path) -> tuple[int, str]:
    """Return the most bytes on the disk, and how they came about (empty: they were given)."""
    found = os.statvfs(folder)
    free_bytes = found.f_bavail * found.f_frsize
    num_ranks, _ = ranks_of_node(os.environ)
    origin = f"the {free_bytes / GIB:.1f} GiB free"
    if settings.gib is None:
        free_bytes = max(0, free_bytes - RESERVE_BYTES)
        origin += f", less {RESERVE_BYTES / GIB:.0f}"
    elif settings.gib * GIB * num_ranks <= free_bytes:
        return int(settings.gib * GIB), ""
    else:
        origin += f", of {settings.gib:g} asked for"
    if num_ranks > 1:
        origin += f", divided by {num_ranks} ranks of this node"
    return free_bytes // num_ranks, origin
