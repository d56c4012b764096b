"""A range of a disk's file, and the host memory through which its bytes go."""

from __future__ import annotations

import enum
from typing import Any

import torch

from hf_pyao.engine.stores.disk_memory import Place
from hf_pyao.engine.stores.store import Buffer
from hf_pyao.errors import InternalError


class Phase(enum.Enum):
    """Where the bytes of a range are."""

    NEW = enum.auto()
    """Nowhere yet."""
    FILLING = enum.auto()
    """Copies into the memory are queued, not all of them."""
    DIRTY = enum.auto()
    """All copies are queued; a thread will write the memory."""
    WRITING = enum.auto()
    """A thread writes the memory."""
    UNWRITTEN = enum.auto()
    """The disk does not take them: the memory keeps them."""
    CLEAN = enum.auto()
    """In the file and in the memory."""
    AWAY = enum.auto()
    """In the file alone."""
    READING = enum.auto()
    """A thread reads them into the memory."""
    LOST = enum.auto()
    """The file does not give them back."""
    OVER = enum.auto()
    """No one can ask for them any more."""


IN_MEMORY = frozenset({Phase.FILLING, Phase.DIRTY, Phase.WRITING, Phase.UNWRITTEN, Phase.CLEAN})
"""Phases in which the bytes are in memory, or will be by copies that are queued."""


_LEGAL = {
    Phase.NEW: (Phase.FILLING, Phase.OVER),
    Phase.FILLING: (Phase.DIRTY, Phase.OVER),
    Phase.DIRTY: (Phase.WRITING, Phase.OVER),
    Phase.WRITING: (Phase.CLEAN, Phase.UNWRITTEN, Phase.LOST),
    Phase.UNWRITTEN: (Phase.OVER,),
    Phase.CLEAN: (Phase.AWAY, Phase.OVER),
    Phase.AWAY: (Phase.READING, Phase.OVER),
    Phase.READING: (Phase.CLEAN, Phase.AWAY, Phase.LOST),
    Phase.LOST: (Phase.OVER,),
    Phase.OVER: (),
}
"""The phases that may follow each phase."""


class DiskRange:
    """Bytes from *offset* on in the file. :class:`~.disk_store.DiskStore` says what happens."""

    def __init__(self, order: int, offset: int, nbytes: int, padded_bytes: int) -> None:
        self.order = order
        """Later ranges are asked for first."""
        self.offset = offset
        self.nbytes = nbytes
        self.padded_bytes = padded_bytes
        """Bytes in file and memory, a multiple of 4096."""
        self.stand_in = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        """Stands for the bytes in views; it has no memory."""
        self.phase = Phase.NEW
        self.place: Place | None = None
        self.memory: torch.Tensor | None = None
        """uint8, shape (padded_bytes,), on the host; None while there is none."""
        self.fills: list[Any] = []
        """Copies into the memory, from the device."""
        self.readers: list[Any] = []
        """Copies out of the memory, to the device."""
        self.num_holders = 0
        """Threads that are about to queue a copy from or into the memory."""
        self.has_lost_copy = False
        """True if a copy from or into the memory may be queued of which no one has the ticket."""
        self.is_used = False
        """True once the bytes were asked for: they are not needed soon again."""
        self.was_read = False
        """True once the bytes in memory are from the file."""
        self.is_released = False
        self.checksum = 0
        self.error: BaseException | None = None
        """Why the bytes are lost."""

    @property
    def key(self) -> int:
        """Identifies the storage of the stand-in, and of views of it."""
        return int(self.stand_in.untyped_storage()._cdata)

    @property
    def is_in_use(self) -> bool:
        """True while a thread reads or writes the memory."""
        return self.phase is Phase.WRITING or self.phase is Phase.READING

    @property
    def can_leave_memory(self) -> bool:
        """True if the file has the bytes too, and no one is about to copy them."""
        return self.phase is Phase.CLEAN and not self.num_holders

    @property
    def was_written(self) -> bool:
        """True unless no thread has begun to write it."""
        return self.phase not in (Phase.NEW, Phase.FILLING, Phase.DIRTY)

    def to(self, phase: Phase) -> None:
        """Change to *phase*; only the transitions in the life of a range are legal."""
        if phase not in _LEGAL[self.phase]:
            raise InternalError(f"illegal transition {self.phase.name} -> {phase.name} on a disk")
        self.phase = phase

    def take_memory(self, place: Place, memory: torch.Tensor) -> None:
        """Take a piece of the memory, which no copy uses."""
        self.place, self.memory = place, memory
        self.fills, self.readers = [], []
        self.has_lost_copy = False

    def let_memory_go(self) -> None:
        """Have no memory any more."""
        self.place = self.memory = None

    def hold(self) -> None:
        """Note that a copy is about to be queued: the memory has to stay."""
        self.num_holders += 1

    def filled(self, copy: Any) -> None:
        """End a :meth:`hold`: *copy* fills the memory; None: an interrupt lost its ticket."""
        self.num_holders -= 1
        if copy is None:
            self.has_lost_copy = True
        else:
            self.fills.append(copy)

    def copied(self, copy: Any) -> None:
        """End a :meth:`hold`: *copy* reads the memory; None: an interrupt lost its ticket."""
        self.num_holders -= 1
        if copy is None:
            self.has_lost_copy = True
        else:
            self.readers.append(copy)
            self.is_used = True

    def not_copied(self) -> None:
        """End a :meth:`hold` after which no copy was asked for."""
        self.num_holders -= 1

    def release(self) -> bool:
        """Note that no one asks for it any more; False if that was known."""
        was_released, self.is_released = self.is_released, True
        return not was_released

    def written_with(self, checksum: int) -> None:
        """Note the checksum of the bytes in memory."""
        self.checksum = checksum

    def read_back(self) -> None:
        """Note that the bytes in memory are from the file."""
        self.was_read = True

    def lost_by(self, cause: BaseException) -> None:
        """Note why the bytes are lost."""
        self.error = cause


class DiskBuffer(Buffer):
    """A range of the file for its holder. ``data`` has no memory: it is on the device ``meta``."""

    __slots__ = ("range",)

    def __init__(self, held: DiskRange) -> None:
        super().__init__(held.stand_in, held.padded_bytes)
        self.range = held
