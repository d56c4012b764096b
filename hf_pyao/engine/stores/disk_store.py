"""A disk below the host's memory, for bytes that leave the device and come back.

[Note: Bytes on a disk]
- Each buffer is a range of one file. Its bytes pass through host memory of a bounded size
  (:data:`MEMORY_BYTES`, or one tensor): a copy from the device fills a piece of it, and a thread
  writes the piece once the copy has ended. The device's copy is let go when the copy to the host
  has ended, not when the disk has the bytes.
- *Forwarding*: who asks for bytes while memory still has them gets them from there, whether they
  were written, are being written or wait for it. A piece is given up only when its bytes are in the
  file and room is needed. What is released before a thread has begun to write it is never written.
- Backward asks for the newest bytes first. So the pieces that are given up first are those that
  were used, then the oldest. Whenever bytes are asked for, those before them are read ahead, into
  pieces that are free or hold what is needed later.
- A range of the file is free again only when no thread reads or writes it, and a piece of the
  memory only when the copies that use it have ended, too.
- A range is used only after its checksum agrees (`engine/checksums.py`, on threads of their own). A
  failed access is tried once more. Bytes that cannot be written stay in memory, and nothing more
  goes to the disk: nothing is lost. Bytes that cannot be read are an error that names the file, in
  backward and so before the optimizer steps.
- The child of a fork shares the file, and has none of the threads. It puts nothing there, and what
  its parent put there is an error that says so.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from hf_pyao.engine.stores.disk_access import REMEDY, DiskAccess
from hf_pyao.engine.stores.disk_blocks import padded
from hf_pyao.engine.stores.disk_figures import FEWER_BYTES, TB, DiskFigures, WriteLimit
from hf_pyao.engine.stores.disk_files import disk_error
from hf_pyao.engine.stores.disk_lanes import CHECK, READ, WRITE, DiskLanes, ThreadedLanes
from hf_pyao.engine.stores.disk_memory import DiskMemory, MakeMemory
from hf_pyao.engine.stores.disk_range import IN_MEMORY, DiskBuffer, DiskRange, Phase
from hf_pyao.engine.stores.free_ranges import FreeRanges
from hf_pyao.engine.stores.nameless_file import NamelessFile
from hf_pyao.engine.stores.store import Buffer, DiskMeter, HostUse, QueuedCopy, Store
from hf_pyao.errors import InternalError, warn

logger = logging.getLogger(__name__)

MEMORY_BYTES = 256 * 2**20
"""Host memory through which the bytes pass."""

GROWTH_BYTES = 2**30
"""Bytes that the file grows by."""

MOST_READ_AHEAD = 256
"""Ranges that are looked at when some are to be read ahead."""


class DiskStore(Store):
    """Keeps bytes in a file. See [Note: Bytes on a disk].

    Args:
        file: where they are.
        capacity_bytes: most bytes in it.
        limit: how much may be written.
        make_memory: makes host memory, page-locked where the copies need that.
        is_done: says whether a copy between device and host has ended.
        await_copy: stops the calling thread, any thread, until such a copy has ended.
        memory_bytes: size of the host memory, a multiple of 4096.
        reserve_bytes: what is left free on the disk, whoever fills it.
        lanes: run what takes time; threads if None.
        limit_origin: says how the capacity came about; empty where the user gave it.
    """

    name: ClassVar[str] = "disk"
    is_host_memory: ClassVar[bool] = False

    def __init__(
        self,
        file: NamelessFile,
        capacity_bytes: int,
        limit: WriteLimit,
        *,
        make_memory: MakeMemory,
        is_done: Callable[[Any], bool],
        await_copy: Callable[[Any], None],
        memory_bytes: int = MEMORY_BYTES,
        reserve_bytes: int = 0,
        lanes: DiskLanes | None = None,
        limit_origin: str = "",
    ) -> None:
        self.file = file
        self.limit_origin = limit_origin
        self.capacity_bytes = capacity_bytes
        self.limit = limit
        self._collected = DiskFigures()
        self.memory = DiskMemory(memory_bytes, make_memory, is_done)
        self._await_copy = await_copy
        self._reserve_bytes = reserve_bytes
        self._lanes = ThreadedLanes() if lanes is None else lanes
        self._lock = threading.RLock()
        self._access = DiskAccess(file, self._lock)
        self.figures = self._access.figures
        self._changed = threading.Condition(self._lock)
        self._space = FreeRanges(0)
        self._orders = itertools.count()
        self._in_memory: dict[int, DiskRange] = {}
        """Those that have a piece of the memory, by order."""
        self._live: dict[int, DiskRange] = {}
        """Ranges that someone may ask for, and those that a thread still uses; oldest first."""
        self._by_key: dict[int, DiskRange] = {}
        self._uses: dict[int, HostUse | None] = {}
        self._released: deque[DiskRange] = deque()
        self._num_jobs = 0
        self._is_stopped = False
        """True once nothing more may go to the disk."""
        self._is_torn = False
        """True if an interrupt may have left these notes half made."""
        self._process_id = os.getpid()

    # ---- as a store ----------------------------------------------------------------------------

    def acquire(self, nbytes: int, use: HostUse | None = None) -> DiskBuffer | None:
        """Return a range of the file for *nbytes*; None where the disk takes no more."""
        if self._is_forked:
            return None
        with self._lock:
            try:
                self._settle()
                held = None if self._is_stopped else self._new_range(nbytes)
                if held is None:
                    return None
                self._live[held.order] = held
                self._by_key[held.key] = held
                self._uses[held.order] = use
                self._count(held, held.padded_bytes)
                buffer = DiskBuffer(held)
                # Also where an interrupt loses it before anyone has it.
                weakref.finalize(buffer, self._released.append, held).atexit = False
                return buffer
            except BaseException:
                self._is_torn = True
                raise

    def release(self, buffer: Buffer, after: QueuedCopy | None = None) -> None:
        """Take *buffer* back: which copies may still use its memory is known here."""
        if isinstance(buffer, DiskBuffer):
            self._released.append(buffer.range)

    def settle(self) -> int:
        """Take back all that was released so far; return the bytes still in use."""
        with self._lock:
            self._settle()
            return self.used_bytes

    def take_peak(self, use: HostUse) -> int:
        """Return the most bytes that *use* had since the last call; start again from now."""
        with self._lock:
            self._settle()
            return use.take_peak()

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Say whether *storage* stands for bytes of the file."""
        return storage._cdata in self._by_key

    def room(self) -> int:
        """Return the bytes that further buffers may take."""
        return 0 if self._is_stopped else self.capacity_bytes - self.used_bytes

    def collect(self, meter: DiskMeter) -> None:
        """Count in *meter* what the disk was asked for since the last call, by any user."""
        now = self.figures.copy()
        new, self._collected = now.since(self._collected), now
        meter.disk_written_bytes += new.written_bytes
        meter.disk_read_bytes += new.read_bytes
        meter.disk_forwarded_bytes += new.forwarded_bytes
        meter.disk_stall_ms += new.stall_ms
        if sentence := self.limit.sentence_once():
            logger.info("%s. %s", sentence, FEWER_BYTES)

    def speeds(self) -> tuple[float, float] | None:
        """Return the speeds at which it was written and read so far; None: it was not, or ends."""
        write, read = self.figures.write_gib_per_s, self.figures.read_gib_per_s
        return None if self._is_stopped or write is None or read is None else (write, read)

    def stop(self) -> None:
        """Let nothing more go to the disk; what is there comes back as before."""
        self._is_stopped = True

    def rest(self) -> None:
        """Let all threads end, and give the file's room back if nothing is there.

        What is there comes back as before, and the disk may be used again: threads start with the
        next access.
        """
        with self._lock:
            self._settle()
        self._lanes.close()
        with self._lock:
            self._settle()
            if not self._live and not self._is_forked:
                self.file.shrink()
                self._space = FreeRanges(0)
                self.pool_bytes = 0

    def close(self) -> None:
        """Stop, and let all threads end."""
        self.stop()
        with self._lock:
            self._settle()
        self._lanes.close()

    # ---- as the transport asks for it ----------------------------------------------------------

    def memory_to_fill(self, storage: torch.UntypedStorage) -> DiskRange:
        """Return the range of *storage* with memory that a copy may fill; see :meth:`filled`."""
        with self._lock:
            held = self._range_of(storage)
            if held.phase is Phase.NEW:
                self._give_memory(held)
                held.to(Phase.FILLING)
            held.hold()
            return held

    def filled(self, held: DiskRange, copy: Any, *, is_last: bool) -> None:
        """Note that *copy* fills the memory of *held*; it is written once the last one is queued.

        Args:
            held: from :meth:`memory_to_fill`.
            copy: the copy's ticket; None: an interrupt lost it, and the copy may be queued. The
                memory is never used again then.
            is_last: whether no other copy fills it.
        """
        with self._lock:
            held.filled(copy)
            if is_last and copy is not None:
                held.to(Phase.DIRTY)
                self._submit(WRITE, held, self._write)
        self._lanes.tick()

    def memory_to_read(self, storage: torch.UntypedStorage) -> DiskRange:
        """Return the range of *storage* with its bytes in memory; see :meth:`copied`.

        It waits until they are. Copies that fill the memory may be pending.

        Raises:
            DiskError: they cannot be read.
        """
        if self._is_forked:
            reason = "this process was forked from the one that wrote there"
            remedy = "Run forward and backward in the same process."
            raise disk_error("read", self.file.path, reason, remedy)
        with self._lock:
            self._settle()
            held = self._range_of(storage)
            held.hold()
            try:
                if held.phase in IN_MEMORY and not (held.is_used or held.was_read):
                    self.figures.forwarded_bytes += held.padded_bytes
                self._bring_to_memory(held)
            except BaseException:
                held.not_copied()
                raise
            return held

    def copied(self, held: DiskRange, copy: Any) -> None:
        """Note that *copy* reads the memory of *held*; None: as in :meth:`filled`."""
        with self._lock:
            held.copied(copy)
            self._read_ahead(held.order)
        self._lanes.tick()

    @property
    def _is_forked(self) -> bool:
        return self._process_id != os.getpid()

    # ---- ranges of the file --------------------------------------------------------------------

    def _range_of(self, storage: torch.UntypedStorage) -> DiskRange:
        held = self._by_key.get(storage._cdata)
        if held is None:
            raise InternalError("a copy of bytes that are on no disk")
        return held

    def _new_range(self, nbytes: int) -> DiskRange | None:
        padded_bytes = max(padded(nbytes), padded(1))
        if not self.limit.take(padded_bytes):
            self._end_at_limit()
            return None
        offset = self._space.take(padded_bytes)
        if offset is None and self._grow(padded_bytes):
            offset = self._space.take(padded_bytes)
        if offset is None:
            self.limit.give_back(padded_bytes)
            return None
        return DiskRange(next(self._orders), offset, nbytes, padded_bytes)

    def _grow(self, needed_bytes: int) -> bool:
        """Reserve more of the disk; False where it has no more, or may have no more."""
        end = self.file.nbytes
        room = self.capacity_bytes - end
        # Others may have written since the capacity was worked out.
        free_bytes = self.file.free_bytes - self._reserve_bytes
        nbytes = min(max(needed_bytes, GROWTH_BYTES), room, free_bytes) // padded(1) * padded(1)
        if nbytes < needed_bytes:
            if free_bytes < room:
                self.capacity_bytes = end
                self._warn_full("what else is on it has left no more than is to stay free")
            return False
        try:
            self.file.grow(nbytes)
        except OSError as cause:
            self.capacity_bytes = end
            full = cause.errno == errno.ENOSPC
            self._warn_full("it is full" if full else cause.strerror or repr(cause))
            return False
        self.pool_bytes = self.file.nbytes
        self._space.give_back(end, nbytes)
        return True

    def _count(self, held: DiskRange, nbytes: int) -> None:
        self.used_bytes += nbytes
        use = self._uses.get(held.order)
        if use is not None:
            use.add(nbytes)

    def _settle(self) -> None:
        if self._is_torn:
            self._take_stock()
        try:
            while self._released:
                held = self._released.popleft()
                if held.release() and not held.is_in_use:
                    self._end(held)
        except BaseException:
            self._is_torn = True
            raise

    def _end(self, held: DiskRange) -> None:
        """Let *held* go, which was released, and which no thread uses."""
        if not held.was_written:
            self.limit.give_back(held.padded_bytes)
        held.to(Phase.OVER)
        self._let_memory_go(held)
        self._live.pop(held.order, None)
        self._by_key.pop(held.key, None)
        self._space.give_back(held.offset, held.padded_bytes)
        self._count(held, -held.padded_bytes)
        self._uses.pop(held.order, None)

    def _take_stock(self) -> None:
        """Work out anew what is free, from the ranges that there are."""
        for held in list(self._live.values()):
            if held.is_released and not held.is_in_use:  # it was being let go
                del self._live[held.order]
                self._let_memory_go(held)
                if held.phase is not Phase.OVER:
                    held.to(Phase.OVER)
        live = list(self._live.values())
        taken = sorted((held.offset, held.padded_bytes) for held in live)
        self._space.free_all_but(taken, self.file.nbytes)
        self.memory.take_stock(held.place for held in live if held.place is not None)
        self.used_bytes = sum(held.padded_bytes for held in live)
        self._count_uses(live)
        self._by_key = {held.key: held for held in live}
        self._in_memory = {held.order: held for held in live if held.place is not None}
        self._is_torn = False

    def _count_uses(self, live: Sequence[DiskRange]) -> None:
        """Count anew what each user has of the ranges that are *live*."""
        uses = {id(use): use for use in self._uses.values() if use is not None}
        self._uses = {held.order: self._uses.get(held.order) for held in live}
        for use in uses.values():
            of_use = (held.padded_bytes for held in live if self._uses[held.order] is use)
            use.add(sum(of_use) - use.used_bytes)

    # ---- memory --------------------------------------------------------------------------------

    def _give_memory(self, held: DiskRange) -> None:
        """Give *held* a piece of the memory, once there is one."""
        began_s = time.perf_counter()
        try:
            while not self._try_memory(held, None):
                if self.memory.is_retiring and not self._num_jobs:
                    self.memory.free_oldest(self._await_copy)
                elif self._num_jobs:
                    self._lanes.wait(self._changed)
                    self._settle()
                else:  # all of it holds what the disk does not take
                    self._take(held, self.memory.take_own(held.padded_bytes))
                    return
        except BaseException:
            self._is_torn = True
            raise
        finally:
            self.figures.stall_ms += 1e3 * (time.perf_counter() - began_s)

    def _try_memory(self, held: DiskRange, needed_from: int | None) -> bool:
        """Give *held* a piece that is free, or that is given up for it; say whether there is one.

        Args:
            held: what needs it.
            needed_from: give up nothing of this order or a later one that was not used; None: give
                up whatever can be.
        """
        while True:
            taken = self.memory.take(held.padded_bytes)
            if taken is not None:
                self._take(held, taken)
                return True
            victim = self._to_give_up(needed_from)
            if victim is None:
                return False
            victim.to(Phase.AWAY)
            self._let_memory_go(victim)

    def _take(self, held: DiskRange, taken: tuple[Any, torch.Tensor]) -> None:
        held.take_memory(*taken)
        self._in_memory[held.order] = held

    def _to_give_up(self, needed_from: int | None) -> DiskRange | None:
        """Return what is needed last of the ranges that memory need not keep."""
        oldest = None
        for held in self._in_memory.values():
            if held.can_leave_memory:
                if held.is_used:
                    return held
                if oldest is None or held.order < oldest.order:
                    oldest = held
        if oldest is None or (needed_from is not None and oldest.order >= needed_from):
            return None
        return oldest

    def _let_memory_go(self, held: DiskRange) -> None:
        if held.place is not None and held.memory is not None:
            if held.has_lost_copy:
                self.memory.abandon(held.place, held.memory)
            else:
                self.memory.retire(held.place, held.memory, [*held.fills, *held.readers])
        held.let_memory_go()
        self._in_memory.pop(held.order, None)

    # ---- jobs ----------------------------------------------------------------------------------

    def _submit(self, lane: str, held: DiskRange, work: Callable[[DiskRange], None]) -> None:
        """Run *work* on *lane*; what it raises is an error of *held*."""

        def job() -> None:
            try:
                work(held)
            except BaseException as cause:  # never on a thread of ours without anyone to hear it
                with self._lock:
                    held.lost_by(cause)
                    if held.is_in_use:
                        self._end_access(held, Phase.LOST)
            finally:
                with self._lock:
                    self._num_jobs -= 1
                    self._changed.notify_all()

        self._num_jobs += 1
        try:
            self._lanes.submit(lane, job)
        except BaseException:  # no thread could be started
            self._num_jobs -= 1
            raise

    def _end_access(self, held: DiskRange, phase: Phase) -> None:
        """Note that a thread has done with *held*."""
        held.to(phase)
        if held.is_released:
            self._end(held)

    def _write(self, held: DiskRange) -> None:
        """Write *held*, on a thread."""
        with self._lock:
            if held.is_released:
                return
            held.to(Phase.WRITING)
            fills = tuple(held.fills)
        for copy in fills:
            self._await_copy(copy)
        failure = self._access.write(held)
        with self._lock:
            if failure is None:
                self.figures.written_bytes += held.padded_bytes
            else:
                self._stop_writing(failure)
            self._end_access(held, Phase.CLEAN if failure is None else Phase.UNWRITTEN)

    def _bring_to_memory(self, held: DiskRange) -> None:
        while held.phase not in IN_MEMORY:
            if held.phase is Phase.AWAY:
                held.to(Phase.READING)  # first: no one else begins while this waits for memory
                try:
                    self._give_memory(held)
                    self._submit(READ, held, self._read)
                except BaseException:
                    held.to(Phase.AWAY)
                    raise
            elif held.phase is Phase.READING:
                began_s = time.perf_counter()
                self._lanes.wait(self._changed)
                self.figures.stall_ms += 1e3 * (time.perf_counter() - began_s)
            elif held.error is not None:
                raise held.error
            else:
                raise InternalError(f"bytes were asked for that are {held.phase.name}")

    def _read_ahead(self, before: int) -> None:
        """Begin to read what was written before the range of order *before*, newest first."""
        if self._num_jobs > MOST_READ_AHEAD:
            return
        older = (held for held in reversed(self._live.values()) if held.order < before)
        for held in itertools.islice(older, MOST_READ_AHEAD):
            if held.phase is Phase.AWAY and not held.is_used and not held.is_released:
                if not self._try_memory(held, held.order):
                    return
                held.to(Phase.READING)
                self._submit(READ, held, self._read)

    def _read(self, held: DiskRange) -> None:
        """Read *held*, on a thread; another thread checks what came."""
        self._access.read(held)
        with self._lock:
            self._submit(CHECK, held, self._check)

    def _check(self, held: DiskRange) -> None:
        """Compare what was read with its checksum, on a thread."""
        self._access.check(held)
        with self._lock:
            held.read_back()
            self.figures.read_bytes += held.padded_bytes
            self._end_access(held, Phase.CLEAN)

    # ---- what is said --------------------------------------------------------------------------

    def _stop_writing(self, cause: OSError) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            warn(
                logger,
                "disk-stopped",
                "cannot write saved tensors to %s: %s. They stay in memory, and nothing more goes "
                "to the disk. Training goes on with what host and device hold. %s",
                self.file.path,
                cause.strerror or repr(cause),
                REMEDY,
            )

    def _end_at_limit(self) -> None:
        self._is_stopped = True
        warn(
            logger,
            "disk-write-limit",
            "disk_write_limit is reached: %.3g TB of saved tensors were written to the disk. "
            "Training goes on with what host and device hold. %s",
            self.limit.taken_bytes / TB,
            FEWER_BYTES,
        )

    def _warn_full(self, reason: str) -> None:
        warn(
            logger,
            "disk-full",
            "the disk of %s gives no more than %.2f GiB: %s. What finds no room stays on the "
            "device.",
            self.file.path,
            self.capacity_bytes / 2**30,
            reason,
        )
