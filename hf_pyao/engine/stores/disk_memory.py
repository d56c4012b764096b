"""Host memory that bytes pass through on their way between the device and a disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hf_pyao.engine.stores.disk_files import PAGE_BYTES
from hf_pyao.engine.stores.free_ranges import FreeRanges

MakeMemory = Callable[[int], torch.Tensor]
"""Returns so many bytes of host memory: uint8, page-locked where copies need that."""


class Place(NamedTuple):
    """Where a piece of the memory is."""

    offset: int
    """First byte; -1 for memory that is no part of the whole."""
    nbytes: int


@dataclass(eq=False)
class Retiring:
    """A piece that no one has any more, and copies that may still use it."""

    place: Place
    copies: Sequence[Any]
    memory: torch.Tensor
    """Kept until they have ended."""


class DiskMemory:
    """Cuts pieces from a piece of host memory that is reserved once, at its first use.

    A piece that is larger than all of it has memory of its own. Pieces begin at multiples of 4096
    bytes. Not thread-safe.

    Args:
        nbytes: size of it, a multiple of 4096.
        make: makes host memory.
        is_done: says whether a copy between device and host has ended.
    """

    def __init__(self, nbytes: int, make: MakeMemory, is_done: Callable[[Any], bool]) -> None:
        self.nbytes = nbytes
        self.own_bytes = 0
        """Bytes of pieces with memory of their own."""
        self.peak_bytes = 0
        """Most bytes that pieces took at once."""
        self._make = make
        self._is_done = is_done
        self._whole: torch.Tensor | None = None
        self._ranges = FreeRanges(nbytes)
        self._taken_bytes = 0
        self._retiring: list[Retiring] = []
        self._abandoned: list[tuple[Place, torch.Tensor]] = []

    def take(self, nbytes: int) -> tuple[Place, torch.Tensor] | None:
        """Return a piece of *nbytes*, a multiple of 4096; None if there is none free."""
        self._free_retired()
        if nbytes > self.nbytes:
            return None if self.own_bytes else self.take_own(nbytes)
        offset = self._ranges.take(nbytes)
        if offset is None:
            return None
        if self._whole is None:
            self._whole = _aligned(self._make(self.nbytes + PAGE_BYTES), self.nbytes)
        self._count(nbytes)
        return Place(offset, nbytes), self._whole[offset : offset + nbytes]

    def take_own(self, nbytes: int) -> tuple[Place, torch.Tensor]:
        """Return a piece of *nbytes* with memory of its own."""
        memory = _aligned(self._make(nbytes + PAGE_BYTES), nbytes)
        self.own_bytes += nbytes
        self._count(nbytes)
        return Place(-1, nbytes), memory

    def retire(self, place: Place, memory: torch.Tensor, copies: Sequence[Any]) -> None:
        """Take a piece back that *copies* may still use."""
        self._retiring.append(Retiring(place, copies, memory))

    def abandon(self, place: Place, memory: torch.Tensor) -> None:
        """Take a piece back that is never used again: no one knows when a copy lets go of it."""
        self._abandoned.append((place, memory))

    @property
    def is_retiring(self) -> bool:
        """True while copies may still use pieces that came back."""
        return bool(self._retiring)

    def free_oldest(self, await_copy: Callable[[Any], None]) -> None:
        """Wait for the copies that use the piece which came back first, and free it."""
        for copy in self._retiring[0].copies:
            await_copy(copy)
        self._free(self._retiring.pop(0).place)

    def take_stock(self, taken: Iterable[Place]) -> None:
        """Work out anew what is free, from the pieces that are *taken*: an interrupt came."""
        places = [*taken, *(each.place for each in self._retiring)]
        places += [place for place, _ in self._abandoned]
        inside = sorted(place for place in places if place.offset >= 0)
        self._ranges.free_all_but(inside, self.nbytes)
        self._taken_bytes = sum(place.nbytes for place in places)
        self.own_bytes = sum(place.nbytes for place in places if place.offset < 0)

    def _free_retired(self) -> None:
        retiring = self._retiring
        for each in list(retiring):
            if all(self._is_done(copy) for copy in each.copies):
                retiring.remove(each)
                self._free(each.place)

    def _free(self, place: Place) -> None:
        self._taken_bytes -= place.nbytes
        if place.offset < 0:
            self.own_bytes -= place.nbytes
        else:
            self._ranges.give_back(*place)

    def _count(self, nbytes: int) -> None:
        self._taken_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._taken_bytes)


def _aligned(memory: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return *nbytes* of *memory* that begin at a multiple of 4096 bytes."""
    start = -memory.data_ptr() % PAGE_BYTES
    return memory[start : start + nbytes]
