"""PyTorch's caching allocator for CUDA as plain arithmetic: which memory a process reserves.

A device counts as full by what the allocator has *reserved*, not by what tensors take. The rules
are those of ``c10/cuda/CUDACachingAllocator.cpp`` (PyTorch 2.9 to 2.13), class
``DeviceCachingAllocator``; each method here names the function that it follows. Left out are CUDA
graphs' private pools, sharing between processes, memory fractions with their garbage collection,
``roundup_power2_divisions``, and blocks that ``record_stream`` holds back: hf_pyao orders its
copies by events and never calls it.

Nothing is allocated.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
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
    """A range of addresses: allocated, free, or (in an expandable segment) without memory.

    The allocator uses it again for other addresses after it was freed and merged into another.
    """

    __slots__ = ("address", "key", "next", "pool", "previous", "size")

    def put(
        self,
        address: int,
        size: int,
        pool: _Pool,
        key: int = 0,
        previous: Block | None = None,
        following: Block | None = None,
    ) -> Block:
        """Put it between two neighbours of the same segment, at lower and at higher addresses."""
        self.address = address
        self.size = size
        self.pool = pool
        self.key = key
        """Size and address as one number while it is free, and in its pool; 0: it is neither."""
        self.previous = previous
        self.next = following
        if previous is not None:
            previous.next = self
        if following is not None:
            following.previous = self
        return self

    @property
    def is_free(self) -> bool:
        return self.key != 0

    @property
    def is_mapped(self) -> bool:
        """Whether there is memory behind the addresses."""
        return self.pool.is_mapped


class _Pool:
    """Free blocks of one stream, either small or large ones (``BlockPool``)."""

    def __init__(
        self, is_small: bool, settings: AllocatorSettings, page_bytes: int | None = None
    ) -> None:
        self.settings = settings
        self.page_bytes = page_bytes or (SMALL_BUFFER_BYTES if is_small else LARGE_BUFFER_BYTES)
        is_cut_finely = is_small or settings.expandable_segments
        self.least_rest_bytes = MIN_BLOCK_BYTES if is_cut_finely else SMALL_BYTES + 1
        """What has to be left of a block for it to become a block (``should_split``)."""
        is_cut_always = is_cut_finely or math.isinf(settings.max_split_bytes)
        self.least_whole_bytes = _EVERYTHING if is_cut_always else int(settings.max_split_bytes)
        """Requests from this on are never served by a part of a block (``should_split``)."""
        self.keys: list[int] = []
        """Size and address of each free block as one number, in order."""
        self.blocks: list[Block] = []
        """The same blocks, in the same order."""
        self.is_mapped = True
        self.reserved_bytes = 0

    @cached_property
    def unmapped(self) -> _Pool:
        """Blocks without memory, which blocks with memory do not merge with."""
        pool = _Pool(False, self.settings)
        pool.is_mapped = False
        return pool

    def insert(self, block: Block) -> None:
        """Put a block in, as it is."""
        block.key = (block.size << _ADDRESS_BITS) + block.address
        at = bisect_left(self.keys, block.key)
        self.keys.insert(at, block.key)
        self.blocks.insert(at, block)

    def remove(self, block: Block) -> None:
        at = bisect_left(self.keys, block.key)
        del self.keys[at], self.blocks[at]
        block.key = 0

    def best(self, at: int, size: int) -> int:
        """Return which block serves *size* if *at* is the smallest that holds it; past the last
        one, if none does (``get_free_block``).

        Of an expandable segment, a block counts with what it can grow to.
        """
        blocks, most = self.blocks, self.settings.max_split_bytes
        grows_to = _can_grow_to(blocks[at])
        while grows_to > blocks[at].size and at + 1 < len(blocks):
            others = _can_grow_to(blocks[at + 1])
            if others >= grows_to:
                break
            at, grows_to = at + 1, others
        if most != math.inf:
            held = blocks[at].size
            if size < most <= held:
                return len(blocks)
            if size >= most and held >= size + self.settings.max_non_split_rounding_bytes:
                return len(blocks)
        return at


class CachingAllocator:
    """The allocator of one device.

    Args:
        settings: what the environment sets.
        limit_bytes: most that may be reserved: the device's memory less its context.
        page_bytes: by which expandable segments grow; None: as PyTorch's do.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        *,
        limit_bytes: float = math.inf,
        page_bytes: int | None = None,
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
        self._page_bytes = page_bytes
        self._pools: dict[int, tuple[_Pool, _Pool]] = {}
        self._made: list[Block] = []
        self._spare: list[Block] = []
        """Those that merged into others, to be used again: making an object takes longer."""
        self._next_address = LARGE_BUFFER_BYTES

    def close(self) -> None:
        """Take the blocks apart, which hold each other: then no garbage collector has to find them.

        The allocator, and its blocks, are of no use afterwards; its counts stay.
        """
        for block in self._made:
            del block.next, block.previous, block.pool
        self._made.clear()
        self._spare.clear()
        self._pools.clear()

    def reset_peaks(self) -> None:
        """Count peaks anew from here."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Allocate on a stream (``malloc``); requests of 0 bytes take nothing in PyTorch.

        Raises:
            DeviceFullError: it does not fit.
        """
        return self.run([rounded(nbytes)], stream=stream)[0]

    def free(self, block: Block) -> None:
        """Give a block back to its pool (``free``)."""
        self.run([~0], [block])

    def run(
        self, events: Iterable[int], blocks: list[Block] | None = None, *, stream: int = 0
    ) -> list[Block]:
        """Allocate on a stream (``malloc``) and free (``free_block``), in the order of *events*.

        All is written out here, without calls, since a replay has thousands of events.

        Args:
            events: the bytes of an allocation, as :func:`rounded` returns them; or ``~number``,
                where the block of that number is freed.
            blocks: those that are there; what is allocated comes behind them. None: there are none.

        Returns:
            All blocks by number, with those that were freed.

        Raises:
            DeviceFullError: one does not fit.
        """
        small, large = self.pools(stream)
        settings = self.settings
        is_special = settings.expandable_segments or settings.max_split_bytes != math.inf
        allocated, peak = self.allocated_bytes, self.peak_allocated_bytes
        blocks = [] if blocks is None else blocks
        made, spare = self._made, self._spare
        for size in events:
            if size > 0:
                pool = small if size <= SMALL_BYTES else large  # get_pool
                keys = pool.keys
                at = bisect_left(keys, size << _ADDRESS_BITS)  # get_free_block
                if is_special and at < len(keys):
                    at = pool.best(at, size)
                if at == len(keys):
                    self.allocated_bytes, self.peak_allocated_bytes = allocated, peak
                    at = self._make_room(pool, size)
                block = pool.blocks[at]
                rest = block.size - size
                if rest < pool.least_rest_bytes or size >= pool.least_whole_bytes:  # should_split
                    del keys[at], pool.blocks[at]
                    size = block.size
                else:
                    address = block.address + size
                    key = (rest << _ADDRESS_BITS) + address
                    block.size = size
                    if spare:
                        part = spare.pop()
                    else:
                        part = Block()
                        made.append(part)
                    part.put(address, rest, pool, key, block, block.next)
                    if at and key < keys[at - 1]:
                        del keys[at], pool.blocks[at]
                        at = bisect_left(keys, key, 0, at)
                        keys.insert(at, key)
                        pool.blocks.insert(at, part)
                    else:
                        keys[at] = key
                        pool.blocks[at] = part
                block.key = 0
                allocated += size
                if allocated > peak:
                    peak = allocated
                blocks.append(block)
            else:
                block = blocks[~size]
                size = block.size
                allocated -= size
                pool = block.pool
                keys = pool.keys
                at = -1  # of a free neighbour, whose place it takes if that keeps the order
                other = block.next
                if other is not None and other.key and other.pool is pool:  # try_merge_blocks
                    at = bisect_left(keys, other.key)
                    size += other.size
                    spare.append(other)
                    block.next = other = other.next
                    if other is not None:
                        other.previous = block
                other = block.previous
                if other is not None and other.key and other.pool is pool:
                    if at >= 0:
                        del keys[at], pool.blocks[at]
                    at = bisect_left(keys, other.key)
                    size += other.size
                    spare.append(other)
                    block.address = other.address
                    block.previous = other = other.previous
                    if other is not None:
                        other.next = block
                block.size = size
                block.key = key = (size << _ADDRESS_BITS) + block.address
                if at >= 0:
                    if at + 1 == len(keys) or key < keys[at + 1]:
                        keys[at] = key
                        pool.blocks[at] = block
                        continue
                    del keys[at], pool.blocks[at]
                at = bisect_left(keys, key)
                keys.insert(at, key)
                pool.blocks.insert(at, block)
        self.allocated_bytes, self.peak_allocated_bytes = allocated, peak
        return blocks

    def release_cached(self) -> None:
        """Give back every segment, or page, that is wholly free (``release_cached_blocks``)."""
        for block in list(self.free_blocks()):
            if self.settings.expandable_segments:
                self._unmap(block)
            elif block.previous is None and block.next is None:
                self._release(block)

    def free_blocks(self) -> Iterator[Block]:
        """Yield the free blocks that have memory."""
        for pools in self._pools.values():
            for pool in pools:
                yield from pool.blocks

    def pools(self, stream: int = 0) -> tuple[_Pool, _Pool]:
        """Return a stream's pools of small and of large blocks."""
        if stream not in self._pools:
            small, large = (_Pool(each, self.settings, self._page_bytes) for each in (True, False))
            self._pools[stream] = small, large
        return self._pools[stream]

    def _make_room(self, pool: _Pool, size: int) -> int:
        """Reserve a block for *size* and return its place in the pool (``malloc``)."""
        block = self._reserve(pool, size)
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
        return bisect_left(pool.keys, block.key)

    def _set_free(self, block: Block, pool: _Pool) -> None:
        """Put a block that was not in use into a pool, and merge it there."""
        block.pool = pool
        self.allocated_bytes += block.size
        self.free(block)

    # ---- segments ------------------------------------------------------------------------------

    def _reserve(self, pool: _Pool, size: int) -> Block | None:
        """Return a free block of newly reserved memory (``alloc_block``); None if there is no
        room."""
        if self.settings.expandable_segments:
            return self._expand(pool, size)
        nbytes = segment_bytes(size)
        if self.reserved_bytes + nbytes > self.limit_bytes:
            return None
        self._count_reserved(pool, nbytes)
        return self._new_range(pool, nbytes)

    def _new_range(self, pool: _Pool, nbytes: int) -> Block:
        block = Block().put(self._next_address, nbytes, pool)
        self._made.append(block)
        pages = -(-nbytes // LARGE_BUFFER_BYTES)
        self._next_address += (pages + 1) * LARGE_BUFFER_BYTES  # aligned, and not beside another
        pool.insert(block)
        return block

    def _count_reserved(self, pool: _Pool, nbytes: int) -> None:
        pool.reserved_bytes += nbytes
        self.reserved_bytes += nbytes
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes

    def _release(self, block: Block) -> None:
        """Give back a segment that is one free block (``release_block``)."""
        block.pool.remove(block)
        self._count_reserved(block.pool, -block.size)

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
        if not block.is_mapped and not self._map(pool, block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self._map(pool, following, min(size - block.size, following.size)):
                return None
            block = following  # which took the free block before it in
        return block

    def _expandable(self, pool: _Pool, size: int) -> Block:
        """Return where to grow: the lowest addresses with room (``find_expandable_block``)."""
        for block in sorted(pool.unmapped.blocks, key=attrgetter("address")):
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
        return self._new_range(pool.unmapped, pages * pool.page_bytes)

    def _map(self, pool: _Pool, block: Block, size: int) -> bool:
        """Put memory behind the first *size* bytes, in whole pages (``map_block``)."""
        nbytes = min(-(-size // pool.page_bytes) * pool.page_bytes, block.size)
        if self.reserved_bytes + nbytes > self.limit_bytes:
            return False
        pool.unmapped.remove(block)
        if nbytes < block.size:
            self._set_free(self._cut(block, nbytes), pool.unmapped)
        self._set_free(block, pool)
        self._count_reserved(pool, nbytes)
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
            self._set_free(self._cut(block, end - block.address), pool)
        if start > block.address:
            middle = self._cut(block, start - block.address)
            self._set_free(block, pool)
            block = middle
        self._count_reserved(pool, -block.size)
        self._set_free(block, pool.unmapped)

    def _cut(self, block: Block, size: int) -> Block:
        """Cut *block*, which is in no pool, down to *size*; return the rest behind it."""
        rest_bytes = block.size - size
        block.size = size
        rest = Block().put(block.address + size, rest_bytes, block.pool, 0, block, block.next)
        self._made.append(rest)
        return rest


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


def _can_grow_to(block: Block) -> int:
    following = block.next
    if following is None or following.pool is block.pool:
        return block.size
    return block.size + following.size
