"""Host memory into which rows of a weight are gathered before they are uploaded."""

from __future__ import annotations

import threading
from typing import Any

import torch

from hf_pyao.engine.stores.store import Store
from hf_pyao.engine.transfer.layout import bytes_view
from hf_pyao.engine.transfer.transport import LinkTimes, Transport
from hf_pyao.engine.weights.host_bytes import aligned


class Staging:
    """Uploads rows through host memory, page-locked where the store's memory is.

    Memory is used again once the copy that reads it has ended. Where the store has no room, it is
    pageable.

    Args:
        store: host memory.
        transport: copies, and knows whether a copy has ended.
    """

    def __init__(self, store: Store, transport: Transport) -> None:
        self._store = store
        self._transport = transport
        self._pieces: list[tuple[torch.Tensor, Any]] = []
        """Memory, and the ticket of the copy that may still read it; None: no one knows of it."""
        self._lock = threading.Lock()

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
        memory = self._free_memory(rows.nbytes)
        gathered = memory[: rows.nbytes]
        torch.index_select(table, 0, numbers, out=gathered.view(table.dtype).view(size))
        target = bytes_view(rows.untyped_storage(), device, 0, rows.nbytes)
        ticket = None
        try:
            ticket = self._transport.reload(gathered, target, label=label, times=times)
            self._transport.wait(ticket)
        except BaseException:  # an interrupt: the copy may be queued, and no one knows
            self._transport.retire_all()
            raise
        finally:
            with self._lock:
                self._pieces.append((memory, ticket))
        return rows

    def _free_memory(self, nbytes: int) -> torch.Tensor:
        """Return memory of *nbytes* at least, which no copy reads; what is too small goes."""
        with self._lock:
            free = self._take_free()
            found = next((memory for memory in free if memory.numel() >= nbytes), None)
            if found is None:
                free.clear()
                found = self._store.reserve(aligned(nbytes))
            return torch.empty(nbytes, dtype=torch.uint8) if found is None else found

    def release(self) -> None:
        """Let go of all memory that no copy reads: it goes back to the store by itself."""
        with self._lock:
            self._take_free()

    def _take_free(self) -> list[torch.Tensor]:
        pieces, is_done = self._pieces, self._transport.is_done
        free = [piece for piece in pieces if piece[1] is not None and is_done(piece[1])]
        self._pieces = [piece for piece in pieces if not any(piece is each for each in free)]
        return [memory for memory, _ in free]
