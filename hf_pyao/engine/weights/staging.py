"""Host memory into which rows of a weight are gathered before they are uploaded."""

from __future__ import annotations

import threading
from typing import Any

import torch

from hf_pyao.engine.stores.store import Store
from hf_pyao.engine.transfer.layout import bytes_view
from hf_pyao.engine.transfer.transport import LinkTimes, Transport
from hf_pyao.engine.weights.host_bytes import aligned


class Piece:
    """Memory for one upload at a time."""

    __slots__ = ("is_lent", "is_reserved", "memory", "ticket")

    def __init__(self, memory: torch.Tensor, *, is_reserved: bool) -> None:
        self.memory = memory
        """uint8, on the host."""
        self.is_reserved = is_reserved
        self.is_lent = True
        self.ticket: Any = None
        """Of the copy that may still read the memory."""


class Staging:
    """Lends host memory for uploads, page-locked where the store's memory is.

    A piece is used again once the copy that reads it has ended. Where the store has no room, the
    memory is pageable and is let go with the upload.

    Args:
        store: host memory.
        transport: knows whether a copy has ended.
    """

    def __init__(self, store: Store, transport: Transport) -> None:
        self._store = store
        self._transport = transport
        self._pieces: list[Piece] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that are held now."""
        return sum(piece.memory.numel() for piece in self._pieces)

    def lend(self, nbytes: int) -> Piece:
        """Return memory of *nbytes* at least, which no copy reads."""
        with self._lock:
            free = [piece for piece in self._pieces if self._is_free(piece)]
            for piece in free:
                if piece.memory.numel() >= nbytes and piece.is_reserved:
                    piece.is_lent = True
                    return piece
            for piece in free:  # too small: batches have grown
                self._drop(piece)
            memory = self._store.reserve(aligned(nbytes))
            is_reserved = memory is not None
            if memory is None:
                memory = torch.empty(nbytes, dtype=torch.uint8)
            piece = Piece(memory, is_reserved=is_reserved)
            self._pieces.append(piece)
            return piece

    def give_back(self, piece: Piece, ticket: Any) -> None:
        """Take *piece* back, which the copy of *ticket* still reads; None: no copy does."""
        piece.ticket = ticket
        piece.is_lent = False

    def upload_rows(
        self,
        table: torch.Tensor,
        numbers: torch.Tensor,
        device: torch.device,
        times: LinkTimes,
        label: str,
    ) -> torch.Tensor:
        """Return some rows of *table*, which is on the host, on *device*; compute waits for them.

        Args:
            table: of one or more dimensions.
            numbers: int64, shape (N,), of the rows, on the host.
            device: where to.
            times: what the copy took, and compute's wait for it.
            label: what the copy is called.
        """
        size = (numbers.numel(), *table.shape[1:])
        rows = torch.empty(size, dtype=table.dtype, device=device)
        if not rows.nbytes:
            return rows
        piece = self.lend(rows.nbytes)
        gathered = piece.memory[: rows.nbytes]
        try:
            torch.index_select(table, 0, numbers, out=gathered.view(table.dtype).view(size))
        except BaseException:
            self.give_back(piece, None)
            raise
        target = bytes_view(rows.untyped_storage(), device, 0, rows.nbytes)
        try:
            ticket = self._transport.reload(gathered, target, label=label, times=times)
            self.give_back(piece, ticket)
            self._transport.wait(ticket)
        except BaseException:
            # An interrupt: the copy may be queued, and no one knows. The piece stays lent then.
            self._transport.retire_all()
            raise
        return rows

    def release(self) -> None:
        """Let go of all memory that no copy reads."""
        with self._lock:
            for piece in [each for each in self._pieces if self._is_free(each)]:
                self._drop(piece)

    def _is_free(self, piece: Piece) -> bool:
        if piece.is_lent:
            return False
        return piece.ticket is None or self._transport.is_done(piece.ticket)

    def _drop(self, piece: Piece) -> None:
        self._pieces.remove(piece)
        if piece.is_reserved:
            self._store.return_reserved(piece.memory)
