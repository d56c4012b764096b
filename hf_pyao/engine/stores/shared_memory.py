"""Host memory that the processes of one node have once (Linux).

The memory is a file without a name (``memfd_create``): it goes with the last process that has it,
however that ends, and takes no room in ``/dev/shm``. A process that knows the file's process and
number opens it through ``/proc``.

What a process reads through :meth:`SharedMemory.private` is shared until it writes there: then the
pages that it writes are its own (copy on write). So nothing that a process does to its weights
(merging adapters, an optimizer's step) reaches the others.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref

import torch


class SharedMemory:
    """A file without a name, in memory.

    Args:
        descriptor: of the file; it is closed with this object.
        nbytes: its size.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes
        weakref.finalize(self, _close, descriptor)

    @classmethod
    def create(cls, nbytes: int) -> SharedMemory:
        """Return new memory, filled with zeros.

        Raises:
            OSError: the system has no room for it, or no such files.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no files in memory (memfd_create)")
        memory = cls(os.memfd_create("pyao"), nbytes)
        os.ftruncate(memory.descriptor, nbytes)
        return memory

    @classmethod
    def of_process(cls, process: int, descriptor: int, nbytes: int) -> SharedMemory:
        """Return the memory that another process of this node has.

        Args:
            process: its number.
            descriptor: the number of the file there.
            nbytes: size of the file.

        Raises:
            OSError: there is no such process or file, or it may not be read.
        """
        return cls(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR), nbytes)

    def shared(self) -> torch.Tensor:
        """Return the bytes as all processes see them: uint8, shape (:attr:`nbytes`,)."""
        return self._map(mmap.MAP_SHARED)

    def private(self) -> torch.Tensor:
        """Return the bytes, shared until they are written: uint8, shape (:attr:`nbytes`,)."""
        return self._map(mmap.MAP_PRIVATE)

    def _map(self, flags: int) -> torch.Tensor:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        mapped = mmap.mmap(self.descriptor, self.nbytes, flags=flags, prot=protection)
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)
