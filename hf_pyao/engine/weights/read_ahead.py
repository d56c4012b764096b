"""Blocks on their way from a disk to the device, through a few pieces of host memory.

[Note: Read ahead]
- A block comes in spans. Each is read into a piece of host memory (page-locked where the device
  needs that), is checked there, and is copied into the slot behind what compute had queued when the
  slot was given to the block.
- A piece is free once the copy out of it has ended, which its event tells; not when its read has.
- While pieces are free, the blocks that come next are read ahead, in the order of the ring. A block
  that was expected wrongly gives its pieces back to one that is asked for.
- Reads run on threads. All else happens on the thread that runs the model: when the ring is asked
  for something, and while it waits for a block. Compute that was queued before goes on meanwhile.
- A span whose bytes do not agree with their checksums is never copied (`stores/disk_reader.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_pyao.engine.stores.disk_files import PAGE_BYTES
from hf_pyao.engine.stores.disk_reader import BlockRead, DiskReader
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.engine.weights.figures import UploadFigures
from hf_pyao.engine.weights.on_disk import Span, WeightsInFile
from hf_pyao.errors import InternalError

_LOOK_AROUND_S = 5e-4
"""How long a wait for one read leaves finished copies unnoticed."""

CopySpan = Callable[[int, torch.Tensor], Any]
"""Queues the copy of host bytes to the slot, from a byte of it on; returns its ticket."""


Coming = tuple[int, WeightsInFile, Sequence[Span]]
"""A block that is read next: number, source and spans."""


class _Piece:
    """Host memory for one span at a time."""

    __slots__ = ("is_starting", "memory", "order", "read", "span", "ticket")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        """uint8, at a multiple of 4096 bytes."""
        self.span: Span | None = None
        self.read: BlockRead | None = None
        """What was read into it, and is not copied yet."""
        self.ticket: Any = None
        """Of the newest copy that reads it."""
        self.order = 0
        """How many copies were queued before that."""
        self.is_starting = False
        """A read is being handed over: an interrupt may leave it so."""


class Arrival:
    """A block that is read, and copied to a slot once there is one.

    Args:
        block: its number.
        source: where its bytes are.
        spans: in the order in which they are read.
    """

    def __init__(self, block: int, source: WeightsInFile, spans: Sequence[Span]) -> None:
        self.block = block
        self.source = source
        self.copy: CopySpan | None = None
        """None while the block is only expected."""
        self.to_read = deque(spans)
        self.pieces: deque[_Piece] = deque()
        """Those whose reads have begun and that are not copied yet."""
        self.error: BaseException | None = None

    @property
    def is_queued(self) -> bool:
        """True once all copies are queued."""
        return not self.to_read and not self.pieces


class ReadAhead:
    """Reads blocks into pieces of host memory, and has them copied to slots.

    The caller calls it on one thread at a time.

    Args:
        memory: uint8, on the host; divided into pieces.
        piece_bytes: of a piece: a multiple of the bytes that have one checksum.
        reader: the threads.
        transport: copies, and tells when a copy has ended.
        counts: what is counted.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        piece_bytes: int,
        reader: DiskReader,
        transport: Transport,
        counts: UploadFigures,
    ) -> None:
        first = -memory.data_ptr() % PAGE_BYTES
        number = (memory.numel() - first) // piece_bytes
        if number < 1:
            raise InternalError("memory for reads ahead is smaller than a piece")
        self.piece_bytes = piece_bytes
        self._memory = memory
        self._pieces = [
            _Piece(memory[first + n * piece_bytes : first + (n + 1) * piece_bytes])
            for n in range(number)
        ]
        self._reader = reader
        self._transport = transport
        self._counts = counts
        self._arrivals: list[Arrival] = []
        """Those that are asked for, and those that are expected, in their order."""
        self._num_copies = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces: the most that is in flight."""
        return len(self._pieces) * self.piece_bytes

    # ---- what the ring asks --------------------------------------------------------------------

    def begin(
        self, block: int, source: WeightsInFile, spans: Sequence[Span], copy: CopySpan
    ) -> Arrival:
        """Bring *block*: read what is not read ahead yet, and copy what is there.

        Args:
            block: number of the block.
            source: where its bytes are.
            spans: its spans.
            copy: queues the copy of a span.
        """
        arrival = self._known(block, source, spans)
        try:
            if arrival not in self._arrivals:
                self._arrivals.append(arrival)
            arrival.copy = copy
            self.go_on()
        except BaseException:  # nobody has the arrival, so that nobody could cancel it
            self.cancel(arrival)
            raise
        return arrival

    def finish(self, arrival: Arrival) -> None:
        """Wait until all copies of *arrival* are queued.

        Raises:
            DiskError: its bytes cannot be read, or are not those that were written. The arrival is
                cancelled then.
        """
        self._arrivals.sort(key=lambda each: each is not arrival)
        began = time.perf_counter()
        self.go_on()
        may_try_again = True  # the failed read may have begun long ago, and the drive be well again
        while not arrival.is_queued:
            if arrival.error is not None:
                if not may_try_again:
                    break
                arrival.error, may_try_again = None, False
            else:
                self._wait_a_little(arrival)
            self.go_on()
        self._counts.disk_wait_ms += 1e3 * (time.perf_counter() - began)
        error = arrival.error
        self.cancel(arrival)
        if error is not None:
            raise error

    def expect(self, coming: Sequence[Coming]) -> None:
        """Read *coming* ahead as far as pieces are free: blocks, sources and spans, in order."""
        kept = [each for each in self._arrivals if each.copy is not None]
        kept += [self._known(*each) for each in coming]
        for arrival in self._arrivals:
            if arrival not in kept:
                self._let_go(arrival)
        self._arrivals = kept
        self.go_on()

    def _known(self, block: int, source: WeightsInFile, spans: Sequence[Span]) -> Arrival:
        """Return what is expected of a block already, or a new arrival."""
        for each in self._arrivals:
            is_expected = each.block == block and each.copy is None
            if is_expected and each.source is source and each.error is None:
                return each
        return Arrival(block, source, spans)

    def cancel(self, arrival: Arrival) -> None:
        """Bring *arrival* no further. Nothing is read for it after this."""
        self._let_go(arrival)
        arrival.to_read.clear()
        if arrival in self._arrivals:
            self._arrivals.remove(arrival)

    def release(self) -> None:
        """Cancel everything, and end the threads. It may be called again."""
        for arrival in list(self._arrivals):
            self.cancel(arrival)
        self._reader.close()

    def wait_for_copies(self) -> None:
        """Stop the host until no copy reads the pieces: their memory is let go."""
        for piece in self._pieces:
            if piece.ticket is not None:
                self._transport.await_on_host(piece.ticket)
                piece.ticket = None

    # ---- pieces --------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Copy what has been read, and read into what is free. It waits for nothing."""
        if any(piece.is_starting for piece in self._pieces):
            self._recover()
        for arrival in self._arrivals:
            if arrival.copy is not None:
                self._copy_what_came(arrival, arrival.copy)
        for arrival in sorted(self._arrivals, key=lambda each: each.copy is None):
            while arrival.to_read and arrival.error is None:
                piece = self._free_piece() or self._taken_from_expected(arrival)
                if piece is None:
                    return
                self._read(arrival, piece)

    def _copy_what_came(self, arrival: Arrival, copy: CopySpan) -> None:
        while arrival.pieces and arrival.error is None:
            piece = arrival.pieces[0]
            if piece.read is not None:
                if not piece.read.is_done:
                    return
                # An interrupt came as it was looked at, or this is the child of a fork.
                if piece.read.is_cancelled or piece.read.is_lost:
                    self._put_back(arrival, 0)
                    continue
                try:
                    piece.read.wait()
                except Exception as error:
                    arrival.error = error
                    self._let_go(arrival)  # others may need the pieces
                    return
                span = piece.span
                assert span is not None
                offset = span.first - piece.read.start
                # An interrupt from here on has the span copied again: the newer ticket counts.
                piece.ticket = copy(span.start, piece.memory[offset : offset + span.nbytes])
                piece.order = self._num_copies = self._num_copies + 1
                piece.read = None
            arrival.pieces.popleft()

    def _read(self, arrival: Arrival, piece: _Piece) -> None:
        span, source = arrival.to_read[0], arrival.source
        piece.span = span
        piece.ticket = None
        piece.is_starting = True
        piece.read = self._reader.read(
            source.file, source.place, piece.memory, span.first, span.nbytes
        )
        arrival.pieces.append(piece)
        piece.is_starting = False
        arrival.to_read.popleft()

    def _free_piece(self) -> _Piece | None:
        return next((piece for piece in self._pieces if self._is_free(piece)), None)

    def _is_free(self, piece: _Piece) -> bool:
        if piece.read is not None or piece.is_starting:
            return False
        return piece.ticket is None or self._transport.is_done(piece.ticket)

    def _taken_from_expected(self, arrival: Arrival) -> _Piece | None:
        """Return a piece of the block that is expected last, for one that is asked for."""
        if arrival.copy is None:
            return None
        for other in reversed(self._arrivals):
            if other.copy is None and other.pieces:
                return self._put_back(other, -1)
        return None

    def _let_go(self, arrival: Arrival) -> None:
        while arrival.pieces:
            self._put_back(arrival, -1)

    def _put_back(self, arrival: Arrival, number: int) -> _Piece:
        """Take a piece from *arrival*, whose span is to be read again; return the piece."""
        piece = arrival.pieces[number]
        if piece.read is not None:
            piece.read.cancel()
            piece.read = None
        assert piece.span is not None
        arrival.to_read.appendleft(piece.span)
        del arrival.pieces[number]
        return piece

    def _recover(self) -> None:
        """Let reads end of which no one knows, since an interrupt came as they were handed over."""
        self._reader.close()
        held = {id(piece) for each in self._arrivals for piece in each.pieces}
        for piece in self._pieces:
            if piece.is_starting:
                piece.is_starting = False
                if id(piece) not in held:
                    piece.read = None

    def _wait_a_little(self, arrival: Arrival) -> None:
        """Wait until something may have changed for *arrival*."""
        reading = arrival if arrival.pieces else None
        copying = [p for p in self._pieces if p.read is None and p.ticket is not None]
        if reading is None and not copying:  # others have all pieces
            reading = next((each for each in self._arrivals if each.copy and each.pieces), None)
            if reading is None:
                raise InternalError("no piece of host memory is left to read a block into")
        if reading is not None:
            if (read := reading.pieces[0].read) is not None:
                read.wait_until_done(_LOOK_AROUND_S)
            return
        oldest = min(copying, key=lambda piece: piece.order)
        self._transport.await_on_host(oldest.ticket)
        oldest.ticket = None

    def note_reads(self) -> None:
        """Bring what is counted of reads up to date."""
        counts, reader = self._counts, self._reader
        counts.disk_read_bytes = reader.read_bytes
        counts.disk_read_ms = reader.read_ms
        counts.num_disk_retries = reader.num_retries
        counts.disk_check_ms = reader.check_ms
