"""What a store is: memory that keeps bytes which left the device, and hands out buffers of it.

A store knows neither devices nor copies. Which stores a link fills, in which order, and how bytes
get there, is told by its tiers (``hf_pyao.engine.transfer.tiers``).
"""

from __future__ import annotations

import abc
from typing import ClassVar, Protocol

import torch

HOST_FULL = "host memory full"
"""The reason for which bytes stay on the device where no store has room for them."""


class Layout(Protocol):
    """How a tensor lies in its memory, as far as a store needs to know it."""

    @property
    def blank(self) -> torch.Tensor:
        """An empty tensor of its dtype."""
        ...

    @property
    def size(self) -> torch.Size:
        """Its size."""
        ...

    @property
    def stride(self) -> tuple[int, ...]:
        """Its strides."""
        ...


class QueuedCopy(Protocol):
    """A copy in some queue, as far as a store needs to know it: a transport's ticket is one."""

    @property
    def queue(self) -> object:
        """Which queue; copies of one queue run in order."""
        ...

    @property
    def order(self) -> int:
        """Position in its queue."""
        ...


class DiskMeter(Protocol):
    """Counts what a disk was asked for."""

    disk_written_bytes: int
    """Bytes that were written, padding included."""
    disk_read_bytes: int
    """Bytes that were read, padding included."""
    disk_forwarded_bytes: int
    """Bytes on their way to the disk that were asked for while host memory still had them."""
    disk_stall_ms: float
    """Time in which the host waited for the disk."""


class Buffer:
    """A piece of a store's memory that its holder may use until it is released."""

    __slots__ = ("__weakref__", "_view", "data", "reserved_bytes", "use")

    def __init__(self, data: torch.Tensor, reserved_bytes: int) -> None:
        self.data = data
        """uint8, shape (nbytes,), on the host; its first byte is aligned to 64 bytes."""
        self.reserved_bytes = reserved_bytes
        """Bytes of the store that it takes."""
        self.use: HostUse | None = None
        """Who has it; None while no one has."""
        self._view: tuple[Layout | None, torch.Tensor | None] = (None, None)

    def view_like(self, layout: Layout) -> torch.Tensor:
        """View the buffer as a tensor of *layout* that begins where the buffer does.

        The newest view is remembered: the next step asks for the same ones.
        """
        known, view = self._view
        if known is not layout or view is None:
            data = self.data
            view = torch.empty(0, dtype=layout.blank.dtype, device=data.device)
            offset = int(data.storage_offset()) // view.itemsize
            view.set_(data.untyped_storage(), offset, layout.size, layout.stride)
            self._view = (layout, view)
        return view


class HostUse:
    """Bytes that one of a store's users has, and the most that it had."""

    __slots__ = ("__weakref__", "peak_bytes", "used_bytes")

    def __init__(self) -> None:
        self.used_bytes = 0
        self.peak_bytes = 0

    def add(self, nbytes: int) -> None:
        """Count *nbytes* more, or fewer."""
        self.used_bytes += nbytes
        if self.used_bytes > self.peak_bytes:
            self.peak_bytes = self.used_bytes

    def take_peak(self) -> int:
        """Return the peak, and start again from what is in use."""
        peak_bytes, self.peak_bytes = self.peak_bytes, self.used_bytes
        return peak_bytes


class Store(abc.ABC):
    """Keeps bytes. A subclass acquires and releases buffers, and counts what they take.

    Forwards may acquire on several threads. Buffers are released in destructors, which run on any
    thread and inside any other call: :meth:`release` takes no lock. An interrupt may lose a buffer
    before anyone has it.
    """

    name: ClassVar[str] = ""
    """Names the kind of memory in messages: ``host memory``."""
    is_host_memory: ClassVar[bool] = True
    """Whether what it keeps takes memory of the host."""
    limit_origin: str = ""
    """Says how the capacity came about; empty where the user gave it."""
    capacity_bytes: int
    """Most bytes that it may reserve."""
    pool_bytes: int = 0
    """Bytes that are reserved, in use or not."""
    used_bytes: int = 0
    """Bytes that buffers take now."""
    barriers: tuple[QueuedCopy, ...] = ()
    """Newest copy of each queue that may still read a released buffer."""

    @property
    def is_pinned(self) -> bool:
        """True if its memory is page-locked, so that copies can run beside compute."""
        return False

    @abc.abstractmethod
    def acquire(self, nbytes: int, use: HostUse | None = None) -> Buffer | None:
        """Return a buffer of *nbytes*; None if there is no room for it.

        *use* counts it. :attr:`barriers` may still read its bytes; order writes behind them.
        """

    @abc.abstractmethod
    def release(self, buffer: Buffer, after: QueuedCopy | None = None) -> None:
        """Take *buffer* back; *after* is the last copy that reads it, if one may be pending."""

    @abc.abstractmethod
    def settle(self) -> int:
        """Take back all that was released so far; return the bytes still in use."""

    @abc.abstractmethod
    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Say whether *storage* is memory of this store's."""

    def reserve(self, nbytes: int, *, in_place_of_bytes: int = 0) -> torch.Tensor | None:
        """Reserve *nbytes* for good, apart from buffers; None if there is no room for them.

        They are taken off :attr:`capacity_bytes`, until :meth:`return_reserved`. Whoever has the
        tensor keeps the memory.

        Args:
            nbytes: how many, exactly.
            in_place_of_bytes: bytes of this process on the host that are let go of for them. Where
                the capacity is a share of what was available, they take nothing of it.

        Returns:
            uint8, shape (nbytes,), on the host, page-locked where the store's memory is.
        """
        return None

    def count_in(self, memory: torch.Tensor, nbytes: int, *, in_place_of_bytes: int = 0) -> bool:
        """Count *nbytes* for *memory*, which is there already, as if it had been reserved here.

        What is counted already is not counted again.

        Returns:
            False if there is no room for them; then nothing is counted.
        """
        return False

    def counts(self, memory: torch.Tensor) -> bool:
        """Say whether *memory* was reserved here, or counted in."""
        return False

    def page_lock(self, memory: torch.Tensor) -> bool:
        """Page-lock *memory* for as long as that tensor lives; False where it cannot be."""
        return False

    def taken_bytes(self, memory: torch.Tensor) -> int:
        """Return what *memory* takes of :attr:`capacity_bytes`; 0 if it is not counted here."""
        return 0

    def return_reserved(self, memory: torch.Tensor) -> int:
        """Add to :attr:`capacity_bytes` again what *memory* took of it, and return that.

        Where no one has the memory any more, this happens by itself.
        """
        return 0

    def room_to_reserve(self, in_place_of_bytes: int = 0) -> int:
        """Return the most bytes that :meth:`reserve` may have, with the same argument."""
        return 0

    def room(self) -> int:
        """Return the bytes that further buffers may take."""
        return self.capacity_bytes - self.used_bytes

    def note_reader(self, copy: QueuedCopy) -> None:
        """Let :attr:`barriers` stand for *copy* too, which may still read a released buffer."""
        others = []
        for barrier in self.barriers:
            if barrier.queue is not copy.queue:
                others.append(barrier)
            elif barrier.order >= copy.order:
                return
        self.barriers = (*others, copy)

    def new_use(self) -> HostUse:
        """Return a count for one more user of the store."""
        return HostUse()

    def take_peak(self, use: HostUse) -> int:
        """Return the most bytes that *use* had since the last call; start again from now."""
        self.settle()
        return use.take_peak()

    def rest(self) -> None:  # noqa: B027 (memory has no threads)
        """Let threads end: the last user has left. The next one may use the store as before."""

    def speeds(self) -> tuple[float, float] | None:
        """Return the speeds at which a disk was written and read, in GiB/s; None: not known."""
        return None

    def collect(self, meter: DiskMeter) -> None:  # noqa: B027 (memory counts nothing)
        """Count in *meter* what a disk was asked for since the last call."""
