"""Copies between the device and a disk, through host memory. See [Note: Bytes on a disk]."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from hf_pyao.engine.stores.disk_range import DiskRange
from hf_pyao.engine.stores.disk_store import DiskStore
from hf_pyao.engine.transfer.graph_task import is_in_backward
from hf_pyao.engine.transfer.transport import (
    CopyOptions,
    HostReleased,
    LinkMeter,
    LinkTimes,
    Transport,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DiskTransport:
    """Copies between the device and the memory of a :class:`~.disk_store.DiskStore`.

    Its tickets are those of *inner*: a copy to the disk has ended for the device once its bytes are
    in the store's memory, and a copy from the disk is queued once they are there. The calling
    thread waits for that; the device does not.

    Args:
        inner: copies between the device and host memory.
        store: the disk.
    """

    name = "disk"
    host_released: HostReleased | None = None

    def __init__(self, inner: Transport, store: DiskStore) -> None:
        self.inner = inner
        self.store = store
        self.needs_pinned_memory = inner.needs_pinned_memory
        # Tickets, marks and speeds are those of *inner*, which answers for them.
        self.handles, self.bandwidth = inner.handles, inner.bandwidth
        self.wait, self.await_on_host, self.is_done = inner.wait, inner.await_on_host, inner.is_done
        self.retire, self.retire_all = inner.retire, inner.retire_all
        self.mark, self.span_of, self.elapsed_ms = inner.mark, inner.span_of, inner.elapsed_ms

    def offload(self, src: torch.Tensor, dst: torch.Tensor, **options: Unpack[CopyOptions]) -> Any:
        """Queue the copy to the store's memory; a thread writes that to the disk then."""
        began_s = time.perf_counter()
        held = self.store.memory_to_fill(dst.untyped_storage())
        _add_stall(options.get("times"), began_s)
        ticket = None
        try:
            ticket = self.inner.offload(src, _view_of(held, dst), **options)
        finally:
            end = dst.storage_offset() * dst.itemsize + dst.nbytes
            self.store.filled(held, ticket, is_last=end == held.nbytes)
        return ticket

    def reload(self, src: torch.Tensor, dst: torch.Tensor, **options: Unpack[CopyOptions]) -> Any:
        """Queue the copy from the store's memory, once the bytes are there.

        Raises:
            DiskError: they cannot be read from the disk.
        """
        began_s = time.perf_counter()
        held = self.store.memory_to_read(src.untyped_storage())
        _add_stall(options.get("times"), began_s)
        ticket = None
        try:
            options["after"] = tuple(held.fills)
            ticket = self.inner.reload(_view_of(held, src), dst, **options)
        finally:
            self.store.copied(held, ticket)
        return ticket

    def collect(self, meter: LinkMeter, times: LinkTimes) -> None:
        """Do nothing: *inner* measured its copies, and the store counts what the disk does."""


def _view_of(held: DiskRange, stand_in: torch.Tensor) -> torch.Tensor:
    """Return the memory of *held* that *stand_in*, a view of its stand-in, stands for."""
    memory = held.memory
    assert memory is not None
    view = torch.empty(0, dtype=stand_in.dtype, device=memory.device)
    start = int(memory.storage_offset()) // view.itemsize + int(stand_in.storage_offset())
    view.set_(memory.untyped_storage(), start, stand_in.size(), stand_in.stride())
    return view


def _add_stall(times: LinkTimes | None, began_s: float) -> None:
    if times is not None:
        elapsed_ms = 1e3 * (time.perf_counter() - began_s)
        times.add_stall(elapsed_ms, in_backward=is_in_backward())
