"""Pages of mapped files, which stay in memory after they were read; here they are let go (Linux).

``from_pretrained`` maps the files of a checkpoint and reads nothing. The first copy of a weight
reads its pages, and they count for the process until the file is unmapped: as long as any weight of
the file lives. So a model whose weights are copied elsewhere would be in memory twice.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from pathlib import Path

import torch

_MADV_PAGEOUT = 21
"""Reclaim these pages (Linux 5.4). Nothing is lost: a page is read again where it is needed."""


class MappedFiles:
    """The file mappings of this process, as they are when this is made.

    Args:
        root: where the file system begins; tests pass one of their own.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._advise = _madvise()
        for line in _read(root / "proc/self/maps").splitlines():
            # address range, permissions, offset, device, inode, path
            parts = line.split(maxsplit=5)
            if len(parts) == 6 and parts[5].startswith("/"):
                start, _, end = parts[0].partition("-")
                self._starts.append(int(start, 16))
                self._ends.append(int(end, 16))

    def has(self, tensor: torch.Tensor) -> bool:
        """Say whether a *tensor* on the host lies in a mapped file."""
        return self._is_inside(tensor.data_ptr(), tensor.nbytes)

    def _is_inside(self, address: int, nbytes: int) -> bool:
        index = bisect_right(self._starts, address) - 1
        return index >= 0 and address + nbytes <= self._ends[index]

    def let_go(self, tensor: torch.Tensor) -> None:
        """Let go of the whole pages under a dense *tensor*, if it lies in a mapped file.

        They are read from the file again where someone reads the tensor. Where the system refuses,
        they stay.
        """
        if self._advise is None or tensor.device.type != "cpu" or not tensor.nbytes:
            return
        address = tensor.data_ptr()
        if not self._is_inside(address, tensor.nbytes):
            return
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (address + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._advise(first, last - first, _MADV_PAGEOUT)


def _madvise() -> ctypes._NamedFuncPointer | None:
    """Return the C library's ``madvise``; None where there is none."""
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
