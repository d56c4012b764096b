"""A tier that the package does not have: bytes are kept in nameless files under ``/dev/shm``."""

from __future__ import annotations

import os
import tempfile
import threading
from collections import defaultdict, deque

import torch

from hf_pyao.engine.stores.store import Buffer, HostUse, QueuedCopy, Store


class SharedMemoryStore(Store):
    """Maps one file for each buffer; buffers are used again by size."""

    name = "shared memory"

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.RLock()
        self._spare: dict[int, list[Buffer]] = defaultdict(list)
        self._released: deque[tuple[Buffer, QueuedCopy | None]] = deque()
        self._keys: set[int] = set()

    def acquire(self, nbytes: int, use: HostUse | None = None) -> Buffer | None:
        with self._lock:
            self.settle()
            spare = self._spare[nbytes]
            buffer = spare.pop() if spare else self._map(nbytes)
            if buffer is not None:
                buffer.use = use
                self._count(buffer, buffer.reserved_bytes)
            return buffer

    def release(self, buffer: Buffer, after: QueuedCopy | None = None) -> None:
        self._released.append((buffer, after))

    def settle(self) -> int:
        with self._lock:
            while self._released:
                buffer, after = self._released.popleft()
                if after is not None:
                    self.note_reader(after)
                self._count(buffer, -buffer.reserved_bytes)
                self._spare[buffer.data.numel()].append(buffer)
            return self.used_bytes

    def owns(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._keys

    def _count(self, buffer: Buffer, nbytes: int) -> None:
        self.used_bytes += nbytes
        if buffer.use is not None:
            buffer.use.add(nbytes)

    def _map(self, nbytes: int) -> Buffer | None:
        if self.pool_bytes + nbytes > self.capacity_bytes:
            return None
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            os.truncate(file.name, nbytes)
            data = torch.from_file(file.name, shared=True, size=nbytes, dtype=torch.uint8)
        self.pool_bytes += nbytes
        self._keys.add(data.untyped_storage()._cdata)
        return Buffer(data, nbytes)
