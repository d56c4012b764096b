"""A pool of host memory in slabs that are reserved once and reused for the whole training.

PyAO paper, section 8.5: pinning memory is slow and freeing it fragments, so it is never given back
before the pool is. Buffers are cut from slabs at byte offsets (best fit, neighbours joined again
when released), so tensors of other sizes, as with other sequence lengths, reuse the same bytes.

[Note: Buffer lifetime]
A released buffer may still be read by a copy that was queued before. The pool therefore keeps the
newest such copy of each queue in :attr:`HostPool.barriers`; code that writes into a pool buffer
orders the write behind them (``Transport.offload(..., after=pool.barriers)``). The copies of one
queue run in order, so the newest one stands for all before it.
Buffers are released from destructors, which may run on any thread and inside any other call of
this pool; hence releasing only appends to a queue, and :meth:`acquire` empties it.
An interrupt may come between two notes of this pool, or lose a buffer before anyone has it. What
counts is then which buffers exist: what is used and what is free is worked out anew from them.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_pyao.engine.stores.host_share import HostShare
from hf_pyao.engine.stores.slabs import ALIGNMENT_BYTES, Slab, SlabSource
from hf_pyao.engine.stores.store import Buffer, HostUse, QueuedCopy, Store
from hf_pyao.errors import warn

logger = logging.getLogger(__name__)


class HostBuffer(Buffer):
    """A piece of a slab that its holder may use until it is released."""

    __slots__ = ("offset", "slab")

    def __init__(self, slab: int, offset: int, reserved_bytes: int, data: torch.Tensor) -> None:
        super().__init__(data, reserved_bytes)
        self.slab = slab
        self.offset = offset
        """Byte offset inside the slab."""


class HostPool(Store):
    """Hands out host buffers from slabs that grow up to a cap and are then reused.

    Args:
        capacity_bytes: most memory that the pool may reserve.
        pin: page-lock the slabs, so that copies can run beside compute. Where pinning fails the
            pool goes on with pageable memory and says so once.
        numa_node: node of the host that the device hangs on; slabs are reserved there.
        share: where the capacity is this process's share of the host memory: before the pool grows
            it asks what the share is by now, and lowers its capacity to that.
        on_release: called with ``(data, after)`` for each buffer given back; test transports
            poison the bytes there.
    """

    name: ClassVar[str] = "host memory"

    def __init__(
        self,
        capacity_bytes: int,
        *,
        pin: bool,
        numa_node: int | None = None,
        share: HostShare | None = None,
        on_release: Callable[[torch.Tensor, QueuedCopy | None], None] | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.share = share
        self.limit_origin = "" if share is None else share.describe()
        self.barriers = ()
        self.pool_bytes = 0
        self.used_bytes = 0
        self.peak_used_bytes = 0
        self.num_slab_allocations = 0
        self._source = SlabSource(pin=pin, numa_node=numa_node)
        self._on_release = on_release
        self._slabs: list[Slab] = []
        self._spare: dict[int, list[HostBuffer]] = {}
        """Buffers that came back, by exact size: the next step asks for the same ones."""
        self._released: deque[tuple[Any, QueuedCopy | None]] = deque()
        """Buffers of this pool's (:class:`HostBuffer`), and the last copy that reads each."""
        self._buffers: weakref.WeakSet[HostBuffer] = weakref.WeakSet()
        """All that are cut from the slabs now; an interrupt may have lost some."""
        self._reserved: dict[int, tuple[StorageWeakRef, int]] = {}
        """Memory apart from slabs, by storage, and what of the capacity it takes."""
        self._uses: weakref.WeakSet[HostUse] = weakref.WeakSet()
        self._has_several_users = False
        """Else what is used is that one's, and need not be counted twice."""
        self._num_buffers = 0
        self._is_torn = False
        """True if an interrupt may have left these notes half made."""
        self._lock = threading.Lock()
        self._is_full_logged = False

    @property
    def pin(self) -> bool:
        """Whether slabs are page-locked; False once the machine has refused that."""
        return self._source.pin

    @property
    def is_pinned(self) -> bool:
        """Whether slabs are page-locked."""
        return self.pin

    def acquire(self, nbytes: int, use: HostUse | None = None) -> HostBuffer | None:
        """Return a buffer of *nbytes* (uint8), or None if the cap or the machine allows no more.

        *use* counts it; None: only the pool as a whole does.
        Bytes of the buffer may still be read by :attr:`barriers`; order writes behind them.
        """
        reserved = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        try:
            with self._lock:
                if self._is_torn:
                    self._take_stock()
                if self._released:
                    self._reap()
                spare = self._spare.get(nbytes)
                if spare:
                    self.used_bytes += reserved
                    if self.used_bytes > self.peak_used_bytes:
                        self.peak_used_bytes = self.used_bytes
                    again = spare.pop()
                    again.use = use
                    if self._has_several_users and use is not None:
                        use.add(reserved)
                    return again
                buffer = self._cut_anywhere(nbytes, reserved)
                if buffer is None and (self._spare or self._has_lost):
                    self._join_spare()
                    buffer = self._cut_anywhere(nbytes, reserved)
                if buffer is None and self._grow(reserved):
                    buffer = self._cut(len(self._slabs) - 1, nbytes, reserved)
                if buffer is not None and use is not None:
                    buffer.use = use
                    if self._has_several_users:
                        use.add(reserved)
                return buffer
        except BaseException:
            self._is_torn = True
            raise

    def reserve(self, nbytes: int, *, in_place_of_bytes: int = 0) -> torch.Tensor | None:
        """Reserve *nbytes* for good, as :meth:`Store.reserve`: in one piece of just that size."""
        with self._lock:
            if nbytes > self.room_to_reserve(in_place_of_bytes):
                return None
            memory = self._source.reserve_exactly(nbytes)
            if memory is not None:
                self._count_reserved(memory, self._taken(nbytes, in_place_of_bytes))
            return memory

    def count_in(self, memory: torch.Tensor, nbytes: int, *, in_place_of_bytes: int = 0) -> bool:
        """Count memory that is there already, as :meth:`Store.count_in`."""
        with self._lock:
            if self.counts(memory):
                return True
            if nbytes > self.room_to_reserve(in_place_of_bytes):
                return False
            self._count_reserved(memory, self._taken(nbytes, in_place_of_bytes))
            return True

    def counts(self, memory: torch.Tensor) -> bool:
        """Say whether *memory* is counted already, as :meth:`Store.counts`."""
        self._give_back_gone()
        return memory.untyped_storage()._cdata in self._reserved

    def taken_bytes(self, memory: torch.Tensor) -> int:
        """Return what *memory* takes of the capacity, as :meth:`Store.taken_bytes`."""
        return self._reserved.get(memory.untyped_storage()._cdata, (None, 0))[1]

    def return_reserved(self, memory: torch.Tensor) -> int:
        """Count *memory* no longer, as :meth:`Store.return_reserved`."""
        _, taken_bytes = self._reserved.pop(memory.untyped_storage()._cdata, (None, 0))
        self.capacity_bytes += taken_bytes
        return taken_bytes

    def _count_reserved(self, memory: torch.Tensor, taken_bytes: int) -> None:
        storage = memory.untyped_storage()
        ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._reserved[storage._cdata] = ref, taken_bytes
        self.capacity_bytes -= taken_bytes

    def _give_back_gone(self) -> None:
        """Have the capacity again of reserved memory that no one has any more."""
        for key, (ref, taken_bytes) in list(self._reserved.items()):
            if ref.expired():  # type: ignore[no-untyped-call]
                del self._reserved[key]
                self.capacity_bytes += taken_bytes

    def page_lock(self, memory: torch.Tensor) -> bool:
        """Page-lock *memory*, as :meth:`Store.page_lock`."""
        return self._source.page_lock(memory)

    def room_to_reserve(self, in_place_of_bytes: int = 0) -> int:
        """Return the most bytes that :meth:`reserve` may have."""
        self._give_back_gone()
        return self.capacity_bytes - self.pool_bytes + self._spared(in_place_of_bytes)

    def _spared(self, in_place_of_bytes: int) -> int:
        """Return what a share of the available memory gains where others are let go of."""
        return 0 if self.share is None else in_place_of_bytes

    def _taken(self, nbytes: int, in_place_of_bytes: int) -> int:
        return max(0, nbytes - self._spared(in_place_of_bytes))

    def release(self, buffer: Buffer, after: QueuedCopy | None = None) -> None:
        """Give *buffer* back; *after* is the last copy that reads it, if one may be pending.

        Safe from any thread and from destructors: it takes no lock.
        """
        self._released.append((buffer, after))

    def new_use(self) -> HostUse:
        """Return a count for one more user of the pool."""
        use = HostUse()
        with self._lock:
            self._uses.add(use)
            if not self._has_several_users and len(self._uses) > 1:
                self._has_several_users = True
                self._count_uses(list(self._buffers))
        return use

    def take_peak(self, use: HostUse) -> int:
        """Return the most that *use* had since the last time, and begin anew from what it has."""
        self.settle()
        if self._has_several_users:
            with self._lock:
                return use.take_peak()
        peak_bytes, self.peak_used_bytes = self.peak_used_bytes, self.used_bytes
        return peak_bytes

    def _count_uses(self, buffers: list[HostBuffer]) -> None:
        for use in self._uses:
            use.used_bytes = 0
            use.add(sum(buffer.reserved_bytes for buffer in buffers if buffer.use is use))

    def settle(self) -> int:
        """Take back everything released so far and return the bytes still in use."""
        try:
            with self._lock:
                if self._is_torn or self._has_lost:
                    self._take_stock()
                self._reap()
                return self.used_bytes
        except BaseException:
            self._is_torn = True
            raise

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Say whether *storage* is one of the slabs, or becomes one: memory of the host's."""
        return self._source.is_reserving or any(
            slab.memory.untyped_storage()._cdata == storage._cdata for slab in self._slabs
        )

    def _reap(self) -> None:
        while self._released:
            buffer, after = self._released[0]
            if after is not None:
                self.note_reader(after)  # first: a buffer that is lost from here on is free
            if self._on_release is not None:
                self._on_release(buffer.data, after)
            self._released.popleft()
            self._spare.setdefault(buffer.data.numel(), []).append(buffer)
            self.used_bytes -= buffer.reserved_bytes
            use, buffer.use = buffer.use, None
            if self._has_several_users and use is not None:
                use.used_bytes -= buffer.reserved_bytes

    def _join_spare(self) -> None:
        """Give the spare buffers back to their slabs, so that other sizes can be cut from them."""
        for buffers in self._spare.values():
            self._buffers.difference_update(buffers)
        self._spare.clear()
        self._take_stock()

    @property
    def _has_lost(self) -> bool:
        """True if a buffer that was handed out is gone without having been released."""
        return len(self._buffers) != self._num_buffers

    def _take_stock(self) -> None:
        """Work out what is used and what is free from the buffers that exist."""
        buffers = list(self._buffers)
        spare = sum(b.reserved_bytes for group in self._spare.values() for b in group)
        for index, slab in enumerate(self._slabs):
            slab.free_all_but(
                sorted((b.offset, b.reserved_bytes) for b in buffers if b.slab == index),
                slab.memory.numel(),
            )
        self.used_bytes = sum(buffer.reserved_bytes for buffer in buffers) - spare
        self._count_uses(buffers)
        self._num_buffers = len(buffers)
        self.pool_bytes = sum(slab.memory.numel() for slab in self._slabs)
        self._is_torn = False

    def _count(self, reserved: int) -> None:
        self.used_bytes += reserved
        if self.used_bytes > self.peak_used_bytes:
            self.peak_used_bytes = self.used_bytes

    def _cut_anywhere(self, nbytes: int, reserved: int) -> HostBuffer | None:
        for index in range(len(self._slabs)):
            buffer = self._cut(index, nbytes, reserved)
            if buffer is not None:
                return buffer
        return None

    def _cut(self, index: int, nbytes: int, reserved: int) -> HostBuffer | None:
        slab = self._slabs[index]
        offset = slab.take(reserved)
        if offset is None:
            return None
        self._count(reserved)
        buffer = HostBuffer(index, offset, reserved, slab.memory[offset : offset + nbytes])
        self._buffers.add(buffer)
        self._num_buffers += 1
        return buffer

    def _grow(self, reserved: int) -> bool:
        """Reserve one more slab that holds *reserved* bytes; False where nothing allows it."""
        memory = self._new_slab(reserved)
        if memory is None:
            self._log_full()
            return False
        self._slabs.append(Slab(memory))
        self.pool_bytes += memory.numel()
        self.num_slab_allocations += 1
        return True

    def _new_slab(self, reserved: int) -> torch.Tensor | None:
        if self.share is not None and reserved <= self.capacity_bytes - self.pool_bytes:
            self.capacity_bytes = min(self.capacity_bytes, self.share.limit_bytes(self.pool_bytes))
        room = self.capacity_bytes - self.pool_bytes
        # Grow with what is there already, so that few slabs serve a run of any size.
        wanted = max(reserved, self._source.wanted_bytes(self.pool_bytes))
        wanted = 1 << (wanted - 1).bit_length()
        nbytes = wanted if wanted <= room else room // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        return self._source.reserve(nbytes, reserved) if nbytes >= reserved else None

    def _log_full(self) -> None:
        if not self._is_full_logged:
            self._is_full_logged = True
            warn(
                logger,
                "host-memory-full",
                "host memory for saved tensors is full: %.2f GiB reserved of at most %.2f GiB%s; "
                "what finds no room stays on the device. Raise host_memory_gib if the machine "
                "has more.",
                self.pool_bytes / 2**30,
                self.capacity_bytes / 2**30,
                "" if self.share is None else f" ({self.limit_origin} at the start)",
            )
