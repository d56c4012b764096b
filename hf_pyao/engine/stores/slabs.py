"""Slabs: what a host pool reserves from the machine at once, and cuts its buffers from."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from hf_pyao.engine.stores.free_ranges import FreeRanges
from hf_pyao.engine.stores.numa import running_near
from hf_pyao.errors import warn

logger = logging.getLogger(__name__)

ALIGNMENT_BYTES = 512
"""Buffers start at multiples of this inside a slab; 64 keeps matrix products bit-identical, 512
suits DMA engines."""

MIN_SLAB_BYTES = 32 * 2**20
"""Smallest slab, a power of two: torch's pinned allocator rounds requests up to one."""

LEAST_SLAB_BYTES = 2**20
"""Smallest slab where the machine refuses larger ones: every slab is looked through for room."""


class Slab(FreeRanges):
    """One reservation, and what of it is free."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(memory.numel())
        self.memory = memory


class SlabSource:
    """Reserves slabs: near the device, page-locked if that is asked for and the machine can.

    Where the machine refuses a slab, smaller ones are tried, and later slabs are no larger.

    Args:
        pin: page-lock the slabs. Where not even a small one can be, it goes on with pageable
            memory and says so once.
        numa_node: node of the host to reserve on.
    """

    def __init__(self, *, pin: bool, numa_node: int | None) -> None:
        self.pin = pin
        self.is_reserving = False
        """True while a slab is being reserved: the memory is not in anyone's list yet."""
        self._largest_bytes = 2**30
        """Larger slabs are reserved only for a buffer that needs one."""
        self._is_refusal_logged = False
        self._numa_node = numa_node

    def wanted_bytes(self, pool_bytes: int) -> int:
        """Return how large the next slab of a pool that has *pool_bytes* already should be."""
        return min(max(MIN_SLAB_BYTES, pool_bytes), self._largest_bytes)

    def reserve(self, nbytes: int, least: int) -> torch.Tensor | None:
        """Reserve a slab of *nbytes*, or a smaller one that holds *least* bytes.

        Returns:
            uint8, shape (between *least* and *nbytes*,); None if the machine refuses that too.
        """
        self.is_reserving = True
        try:
            with running_near(self._numa_node):
                if self.pin:
                    memory, refusal = self._try_sizes(nbytes, least, pin=True)
                    if memory is not None:
                        return memory
                    self.pin = False
                    _warn_of_pageable(nbytes, refusal)
                return self._try_sizes(nbytes, least, pin=False)[0]
        finally:
            self.is_reserving = False

    def reserve_exactly(self, nbytes: int) -> torch.Tensor | None:
        """Reserve just *nbytes*, page-locked if that is asked for and the machine can.

        torch's own page-locked memory is rounded up to a power of two. So pageable memory is
        registered with CUDA; other devices get torch's.

        Returns:
            uint8, shape (nbytes,); None if the machine refuses.
        """
        with running_near(self._numa_node):
            if self.pin and not torch.cuda.is_available():
                return self.reserve(nbytes, nbytes)
            try:
                memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            except RuntimeError:
                return None
            if self.pin:
                _page_lock(memory)
        return memory

    def page_lock(self, memory: torch.Tensor) -> bool:
        """Page-lock *memory* for as long as that tensor lives; False where it cannot be.

        CUDA alone registers memory that is there.
        """
        return torch.cuda.is_available() and _page_lock(memory)

    def _try_sizes(self, nbytes: int, least: int, *, pin: bool) -> tuple[torch.Tensor | None, str]:
        """Return the largest slab that the machine gives, and its error for the last larger one."""
        refusal = ""
        for size in _sizes_to_try(nbytes, least):
            try:
                memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin)
            except RuntimeError as error:
                refusal = str(error).splitlines()[0]
                continue
            if size < nbytes:
                power_of_two = 1 << (size.bit_length() - 1)
                self._largest_bytes = max(power_of_two, LEAST_SLAB_BYTES)
                self._warn_of_smaller(nbytes, size, refusal)
            return memory, refusal
        return None, refusal

    def _warn_of_smaller(self, nbytes: int, size: int, refusal: str) -> None:
        if not self._is_refusal_logged:
            self._is_refusal_logged = True
            warn(
                logger,
                "host-memory-refused",
                "the machine refused %.3f GiB of host memory in one piece (%s); going on with "
                "pieces of %.3f GiB. Its memory is nearly used up: lower host_memory_gib if "
                "others need it.",
                nbytes / 2**30,
                refusal,
                size / 2**30,
            )


def _page_lock(memory: torch.Tensor) -> bool:
    """Register *memory* with CUDA for as long as this tensor lives; say so where that fails."""
    address, nbytes = memory.data_ptr(), memory.numel()
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(address, nbytes, 0)
    if int(error):
        _warn_of_pageable(nbytes, f"cudaHostRegister: error {int(error)}")
        return False
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return True


def _warn_of_pageable(nbytes: int, refusal: str) -> None:
    warn(
        logger,
        "host-memory-not-pinned",
        "cannot pin %.3f GiB of host memory, nor less of it (%s); going on with pageable memory, "
        "whose copies do not overlap with compute. Raise the locked-memory limit (`ulimit -l`), "
        "or lower host_memory_gib.",
        nbytes / 2**30,
        refusal,
    )


def _sizes_to_try(nbytes: int, least: int) -> Iterator[int]:
    """Yield *nbytes* and halves of it, down to *least*."""
    least = max(least, min(nbytes, LEAST_SLAB_BYTES))
    while nbytes > least:
        yield nbytes
        nbytes = nbytes // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    yield least
