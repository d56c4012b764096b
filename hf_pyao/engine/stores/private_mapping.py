"""A block of a file as memory of this process: read from the file, written to pages of its own.

The kernel tells which pages were written (``/proc/self/pagemap``: a page of a private mapping that
is no page of the file any more was copied for a write). So a change is found however it was made.
"""

from __future__ import annotations

import mmap
import os

import torch

from hf_pyao.engine.stores.disk_blocks import BlockFile, BlockPlace, padded
from hf_pyao.engine.stores.disk_files import PAGE_BYTES

PAGEMAP = "/proc/self/pagemap"

_ENTRY_BYTES = 8
_KIND_SHIFT = 61
"""Of an entry: bit 63 in memory, 62 swapped out, 61 a page of a file (kernel: admin-guide/mm,
pagemap)."""


def private_mapping(file: BlockFile, place: BlockPlace) -> torch.Tensor:
    """Map a block, copy on write: uint8, shape (nbytes,), at a multiple of 4096 bytes.

    Nothing is read until someone reads the tensor. Nothing reaches the file.

    Raises:
        OSError: the system refuses the mapping.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    mapped = mmap.mmap(
        file.descriptor,
        max(padded(place.nbytes), PAGE_BYTES),
        flags=mmap.MAP_PRIVATE,
        prot=protection,
        offset=place.offset,
    )
    return torch.frombuffer(mapped, dtype=torch.uint8)[: place.nbytes]


def was_written(memory: torch.Tensor) -> bool:
    """Say whether this process has written to pages of a :func:`private_mapping`.

    Raises:
        OSError: the kernel does not tell.
    """
    first = memory.data_ptr() // mmap.PAGESIZE
    last = -(-(memory.data_ptr() + memory.numel()) // mmap.PAGESIZE)
    descriptor = os.open(PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.pread(descriptor, (last - first) * _ENTRY_BYTES, first * _ENTRY_BYTES)
    finally:
        os.close(descriptor)
    if len(found) != (last - first) * _ENTRY_BYTES:
        raise OSError(None, f"{PAGEMAP} is too short")
    entries = torch.frombuffer(bytearray(found), dtype=torch.int64) >> _KIND_SHIFT
    is_there, is_of_file = (entries & 0b110) != 0, (entries & 1) != 0
    return bool((is_there & ~is_of_file).any())


def tells_writes(file: BlockFile) -> bool:
    """Say whether :func:`was_written` works on this system, by a write to a mapped page."""
    probe = private_mapping(file, BlockPlace(0, 1, ()))
    try:
        before = was_written(probe)
        probe += 0
        return not before and was_written(probe)
    except OSError:
        return False
