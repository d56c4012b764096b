"""PyTorch's caching allocator for CUDA as plain arithmetic: which memory a process reserves.

A device counts as full by what the allocator has *reserved*, not by what tensors take. The rules
are those of ``c10/cuda/CUDACachingAllocator.cpp`` (PyTorch 2.9 to 2.13), class
``DeviceCachingAllocator``; each method here names the function that it follows. Left out are CUDA
graphs' private pools, sharing between processes, memory fractions with their garbage collection,
``roundup_power2_divisions``, and blocks that ``record_stream`` holds back: hf_pyao orders its
copies by events and never calls it.

Nothing is allocated. An event takes a few microseconds.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_pyao.errors import ConfigError, PyAOError
from hf_pyao.text import echo

EXPANDABLE_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
"""What a user sets where fragmentation costs memory."""

MIB = 2**20
MIN_BLOCK_BYTES = 512
"""``kMinBlockSize``: sizes are rounded up to multiples of this."""
SMALL_BYTES = MIB
"""``kSmallSize``: the largest request of the small pool."""
SMALL_BUFFER_BYTES = 2 * MIB
"""``kSmallBuffer``: segments of the small pool, and their pages where segments are expandable."""
LARGE_BUFFER_BYTES = 20 * MIB
"""``kLargeBuffer``: segments for requests below :data:`MIN_LARGE_BYTES`, and pages of the large
pool where segments are expandable."""
MIN_LARGE_BYTES = 10 * MIB
"""``kMinLargeAlloc``: requests from this on get a segment of their own."""
LARGE_ROUNDING_BYTES = 2 * MIB
"""``kRoundLarge``: the sizes of such segments are multiples of this."""
_EVERYTHING = 2**62
_ADDRESS_BITS = 72


class DeviceFullError(PyAOError, MemoryError):
    """A request does not fit, also after cached segments were given back."""

    key = "replayed-device-full"


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """What of ``PYTORCH_CUDA_ALLOC_CONF`` changes which memory is reserved."""

    expandable_segments: bool = False
    """One segment for each pool and stream, which grows by pages."""
    max_split_bytes: float = math.inf
    """``max_split_size_mb``: larger blocks are not split."""
    max_non_split_rounding_bytes: int = LARGE_BUFFER_BYTES
    """``max_non_split_rounding_mb``: by how much such a block may exceed the request it serves."""

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Read what ``PYTORCH_CUDA_ALLOC_CONF`` holds, such as ``expandable_segments:True``.

        Settings that do not change which memory is reserved, or are not replayed, are passed over.

        Raises:
            ConfigError: *text* is no list of ``name:value``, or a value is none.
        """
        values: dict[str, Any] = {}
        for name, value in _SETTING.findall(text):
            if name == "expandable_segments":
                if value not in ("True", "False"):
                    raise _bad_setting(name, value, "True or False")
                values[name] = value == "True"
            elif name in _SIZES:
                if not value.isdigit():
                    raise _bad_setting(name, value, "a whole number of MiB")
                values[_SIZES[name]] = int(value) * MIB
        if text.strip() and not _SETTING.search(text):
            raise ConfigError(
                f"{echo(text)} are no settings of PyTorch's allocator; expected name:value, such "
                "as expandable_segments:True.",
                key="setting-value",
            )
        return cls(**values)

    def __str__(self) -> str:
        """Return them as ``PYTORCH_CUDA_ALLOC_CONF`` has them; empty for the default."""
        found = ["expandable_segments:True"] if self.expandable_segments else []
        default = AllocatorSettings()
        for name, field in _SIZES.items():
            if getattr(self, field) != getattr(default, field):
                found.append(f"{name}:{getattr(self, field) // MIB}")
        return ",".join(found)


_SIZES = {
    "max_split_size_mb": "max_split_bytes",
    "max_non_split_rounding_mb": "max_non_split_rounding_bytes",
}

_SETTING = re.compile(r"(\w+)\s*:\s*(\[[^\]]*\]|[^,\s]+)")


def _bad_setting(name: str, value: str, expected: str) -> ConfigError:
    return ConfigError(f"{name} is {echo(value)}; expected {expected}.", key="setting-value")


class Block:
    """A range of addresses: allocated, free, or (in an expandable segment) without memory."""

    __slots__ = ("address", "is_free", "is_mapped", "next", "pool", "previous", "size")

    def __init__(self, address: int, size: int, pool: _Pool) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.previous: Block | None = None
        """The neighbour at lower addresses of the same segment."""
        self.next: Block | None = None
        self.is_free = True
        self.is_mapped = True
        """False for addresses without memory behind them."""


class _Pool:
    """Free blocks of one stream, either small or large ones (``BlockPool``)."""

    def __init__(self, is_small: bool, settings: AllocatorSettings) -> None:
        self.settings = settings
        self.page_bytes = SMALL_BUFFER_BYTES if is_small else LARGE_BUFFER_BYTES
        is_cut_finely = is_small or settings.expandable_segments
        self.least_rest_bytes = MIN_BLOCK_BYTES if is_cut_finely else SMALL_BYTES + 1
        """What has to be left of a block for it to become a block (``should_split``)."""
        self.least_whole_bytes = math.inf if is_cut_finely else settings.max_split_bytes
        """Requests from this on are never served by a part of a block (``should_split``)."""
        self.keys: list[int] = []
        """Size and address of each free block with memory as one number, in order."""
        self.blocks: list[Block] = []
        """The same blocks, in the same order."""
        self.unmapped: list[int] = []
        """Addresses of blocks without memory, in order."""
        self.unmapped_blocks: list[Block] = []

    def insert(self, block: Block) -> None:
        if block.is_mapped:
            key = (block.size << _ADDRESS_BITS) + block.address
            at = bisect_left(self.keys, key)
            self.keys.insert(at, key)
            self.blocks.insert(at, block)
        else:
            at = bisect_left(self.unmapped, block.address)
            self.unmapped.insert(at, block.address)
            self.unmapped_blocks.insert(at, block)

    def remove(self, block: Block) -> None:
        if block.is_mapped:
            at = bisect_left(self.keys, (block.size << _ADDRESS_BITS) + block.address)
            del self.keys[at], self.blocks[at]
        else:
            at = bisect_left(self.unmapped, block.address)
            del self.unmapped[at], self.unmapped_blocks[at]

    def take_best(self, size: int) -> Block | None:
        """Take the smallest free block that holds *size* (``get_free_block``).

        Of an expandable segment, a block counts with what it can grow to.
        """
        keys, settings = self.keys, self.settings
        at = bisect_left(keys, size << _ADDRESS_BITS)
        if at == len(keys):
            return None
        if settings.expandable_segments:
            at = self._least_growing(at)
        if settings.max_split_bytes != math.inf:
            most, held = settings.max_split_bytes, self.blocks[at].size
            if size < most <= held:
                return None
            if size >= most and held >= size + settings.max_non_split_rounding_bytes:
                return None
        del keys[at]
        return self.blocks.pop(at)

    def _least_growing(self, at: int) -> int:
        """Return the first block from *at* on that the next one can grow beyond."""
        blocks = self.blocks
        grows_to = _can_grow_to(blocks[at])
        for other in range(at + 1, len(blocks)):
            others = _can_grow_to(blocks[other])
            if others >= grows_to:
                break
            at, grows_to = other, others
        return at

    def merge(self, block: Block, other: Block | None) -> None:
        """Join *block* with a neighbour that is free as it is (``try_merge_blocks``)."""
        if other is None or not other.is_free or other.is_mapped != block.is_mapped:
            return
        self.remove(other)
        if block.previous is other:
            block.address = other.address
            block.previous = other.previous
            if block.previous is not None:
                block.previous.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.previous = block
        block.size += other.size


class CachingAllocator:
    """The allocator of one device.

    Args:
        settings: what the environment sets.
        limit_bytes: most that may be reserved: the device's memory less its context.
    """

    def __init__(
        self, settings: AllocatorSettings | None = None, *, limit_bytes: float = math.inf
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.limit_bytes = limit_bytes
        self.allocated_bytes = 0
        """Of blocks that are in use: requests, rounded up."""
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_retries = 0
        """How often cached segments were given back since a request did not fit otherwise."""
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._next_address = LARGE_BUFFER_BYTES

    def reset_peaks(self) -> None:
        """Count peaks anew from here."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Allocate on a stream (``malloc``); requests of 0 bytes take nothing in PyTorch.

        Raises:
            DeviceFullError: it does not fit.
        """
        return self.serve(rounded(nbytes), stream)

    def serve(self, size: int, stream: int = 0) -> Block:
        """Allocate *size* bytes, which :func:`rounded` returned, on a stream.

        Raises:
            DeviceFullError: it does not fit.
        """
        pool = self._pools.get((stream, size <= SMALL_BYTES)) or self._pool(stream, size)
        block = pool.take_best(size) or self._reserve(pool, size)
        if block is None and self._release_oversized(pool, size):
            block = self._reserve(pool, size)
        if block is None:
            self.release_cached()
            self.num_retries += 1
            block = self._reserve(pool, size)
        if block is None:
            raise DeviceFullError(
                f"{size} bytes were asked for; {self.allocated_bytes} are allocated and "
                f"{self.reserved_bytes} reserved of {self.limit_bytes:.0f}."
            )
        if block.size - size >= pool.least_rest_bytes and size < pool.least_whole_bytes:
            pool.insert(_cut(block, size))
        block.is_free = False
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool (``free_block``)."""
        self.allocated_bytes -= block.size
        block.is_free = True
        pool = block.pool
        if block.previous is not None and block.previous.is_free:
            pool.merge(block, block.previous)
        if block.next is not None and block.next.is_free:
            pool.merge(block, block.next)
        pool.insert(block)

    def release_cached(self) -> None:
        """Give back every segment, or page, that is wholly free (``release_cached_blocks``)."""
        for pool in self._pools.values():
            for block in list(pool.blocks):
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    self._release(block)

    def free_blocks(self) -> Iterator[Block]:
        """Yield the free blocks that have memory."""
        for pool in self._pools.values():
            yield from pool.blocks

    def _pool(self, stream: int, size: int) -> _Pool:
        """Make the pool that serves requests of *size* on a stream (``get_pool``)."""
        is_small = size <= SMALL_BYTES
        pool = self._pools[stream, is_small] = _Pool(is_small, self.settings)
        return pool

    # ---- segments ------------------------------------------------------------------------------

    def _reserve(self, pool: _Pool, size: int) -> Block | None:
        """Return a block from newly reserved memory (``alloc_block``); None if there is no room."""
        if self.settings.expandable_segments:
            return self._expand(pool, size)
        nbytes = segment_bytes(size)
        if self.reserved_bytes + nbytes > self.limit_bytes:
            return None
        self._count_reserved(nbytes)
        return self._new_range(pool, nbytes)

    def _new_range(self, pool: _Pool, nbytes: int) -> Block:
        address = self._next_address
        pages = -(-nbytes // LARGE_BUFFER_BYTES)
        self._next_address += (pages + 1) * LARGE_BUFFER_BYTES  # aligned, and not beside another
        return Block(address, nbytes, pool)

    def _count_reserved(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes

    def _release(self, block: Block) -> None:
        """Give back a segment that is one free block (``release_block``)."""
        block.pool.remove(block)
        self.reserved_bytes -= block.size

    def _release_oversized(self, pool: _Pool, size: int) -> bool:
        """Give back free blocks that may not be split (``release_available_cached_blocks``).

        Returns:
            True if they held *size*.
        """
        most = self.settings.max_split_bytes
        if math.isinf(most) or self.settings.expandable_segments:
            return False
        wanted, released = max(size, int(most)), 0
        at = bisect_left(pool.keys, wanted << _ADDRESS_BITS)
        if at < len(pool.keys):
            self._release(pool.blocks[at])
            return True
        while released < wanted and pool.blocks and pool.blocks[-1].size >= most:
            block = pool.blocks[-1]
            released += block.size
            self._release(block)
        return released >= wanted

    # ---- expandable segments -------------------------------------------------------------------

    def _expand(self, pool: _Pool, size: int) -> Block | None:
        """Map memory until a block holds *size* (``try_allocate_expandable_block``)."""
        block = self._expandable(pool, size)
        if not block.is_mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following  # which took the free block before it in
        pool.remove(block)
        return block

    def _expandable(self, pool: _Pool, size: int) -> Block:
        """Return where to grow: the lowest addresses with room (``find_expandable_block``)."""
        for block in pool.unmapped_blocks:
            if block.previous is not None and block.previous.is_free:
                block = block.previous
            room, each = 0, block
            while room < size and each is not None and each.is_free:
                room += each.size
                each = each.next  # type: ignore[assignment]
            if room >= size:
                return block
        most = _EVERYTHING if math.isinf(self.limit_bytes) else 9 * int(self.limit_bytes) // 8
        pages = -(-max(most, size) // pool.page_bytes)
        block = self._new_range(pool, pages * pool.page_bytes)
        block.is_mapped = False
        pool.insert(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Put memory behind the first *size* bytes, in whole pages (``map_block``)."""
        pool = block.pool
        nbytes = min(-(-size // pool.page_bytes) * pool.page_bytes, block.size)
        if self.reserved_bytes + nbytes > self.limit_bytes:
            return False
        pool.remove(block)
        if nbytes < block.size:
            pool.insert(_cut(block, nbytes))
        block.is_mapped = True
        pool.merge(block, block.previous)
        pool.merge(block, block.next)
        pool.insert(block)
        self._count_reserved(nbytes)
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages of a free block (``unmap_block``)."""
        pool = block.pool
        page = pool.page_bytes
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if start >= end:
            return
        pool.remove(block)
        if end < block.address + block.size:
            pool.insert(_cut(block, end - block.address))
        if start > block.address:
            middle = _cut(block, start - block.address)
            pool.insert(block)
            block = middle
        block.is_mapped = False
        self.reserved_bytes -= block.size
        pool.merge(block, block.previous)
        pool.merge(block, block.next)
        pool.insert(block)


def rounded(nbytes: int) -> int:
    """Return what a request takes of a block (``round_size``)."""
    return max(1, -(-nbytes // MIN_BLOCK_BYTES)) * MIN_BLOCK_BYTES


def segment_bytes(size: int) -> int:
    """Return what is reserved for a rounded request (``get_allocation_size``)."""
    if size <= SMALL_BYTES:
        return SMALL_BUFFER_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_BUFFER_BYTES
    return -(-size // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES


def _cut(block: Block, size: int) -> Block:
    """Cut *block* down to *size*; return the rest as a free block behind it."""
    rest = Block(block.address + size, block.size - size, block.pool)
    rest.is_mapped = block.is_mapped
    rest.previous, rest.next = block, block.next
    if rest.next is not None:
        rest.next.previous = rest
    block.next = rest
    block.size = size
    return rest


def _can_grow_to(block: Block) -> int:
    following = block.next
    if following is None or following.is_mapped:
        return block.size
    return block.size + following.size
