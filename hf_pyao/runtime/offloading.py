"""Queues the copies of saved storages to the host, encoded or as they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from hf_pyao.codecs import Codec
from hf_pyao.runtime.layout import (
    TensorLayout,
    bytes_view,
    is_row_statistic,
    part_targets,
    place_parts,
    range_to_move,
    rows_view,
    view_of_storage,
)
from hf_pyao.runtime.ranges import in_range, is_profiling
from hf_pyao.runtime.saved_tensor import SavedStorage
from hf_pyao.runtime.tape import LayerCall, Slot
from hf_pyao.runtime.transport import Transport
from hf_pyao.runtime.window import OffloadWindow
from hf_pyao.stores import HostPool


class StorageOffloader:
    """Writes saved storages to the host.

    Args:
        transport: copies bytes.
        pool: host memory.
        window: device copies that wait to leave.
        on_release: called with each storage that no graph node can ask for any more, from its
            destructor.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        pool: HostPool,
        window: OffloadWindow,
        on_release: Callable[[SavedStorage], None],
    ) -> None:
        self._transport = transport
        self._pool = pool
        self._window = window
        self._on_release = on_release
        self._byte_blanks: dict[torch.device, torch.Tensor] = {}

    def offload(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        layout: TensorLayout,
        storage: torch.UntypedStorage,
        slot: Slot,
        codec: Codec,
    ) -> SavedStorage | None:
        """Queue the copy of *tensor*'s storage to the host; None if the host has no room.

        Args:
            call: the layer call that saves it.
            tensor: what autograd saves, plain and dense, on a device that the transport handles.
            layout: that of *tensor*.
            storage: that of *tensor*.
            slot: its slot in the layer.
            codec: how to write it, if the codec takes it; else its bytes go as they are.
        """
        nbytes = slot.candidate.nbytes
        is_all = layout.nbytes == nbytes
        span = (0, nbytes) if is_all else range_to_move(tensor, nbytes)
        label = slot.label
        if codec.name != "identity":
            rows = self._rows_to_encode(call, tensor, storage, span, codec)
            if rows is not None:
                return self._queued(self._encode(call, tensor, layout, slot, span, codec, rows))
        pool = self._pool
        host = pool.acquire(span[1] - span[0])
        if host is None:
            return None
        record = SavedStorage(call, label, span, nbytes, tensor, layout, host, self._on_release)
        if is_all and layout.is_copied_as_it_is:
            source = record.source
            target = record.host_view = host.view_like(layout)
        else:
            source = self._flat(storage, tensor, span)
            target = host.data
        record.payload = (source,)
        offload = self._transport.offload
        if is_profiling():
            offload = in_range(offload, "offload", label.layer)
        record.offload_ticket = offload(source, target, after=pool.barriers, label=label)
        return self._queued(record)

    def _queued(self, record: SavedStorage | None) -> SavedStorage | None:
        """Count *record*, whose copy is queued, and let the window hold its device copy."""
        if record is None:
            return None
        stats = record.call.tape.stats
        stats.offloaded_bytes += record.nbytes
        stats.link_bytes += record.device_bytes
        record.call.records.append(weakref.ref(record))
        self._window.add(record, record.device_bytes)
        return record

    def _flat(
        self, storage: torch.UntypedStorage, tensor: torch.Tensor, span: tuple[int, int]
    ) -> torch.Tensor:
        """View bytes of *storage* as a flat uint8 tensor; nothing is copied."""
        start, end = span
        device = tensor.device
        blank = self._byte_blanks.get(device)
        if blank is None or type(tensor) is not torch.Tensor:
            flat = bytes_view(storage, device, start, end)
            if type(tensor) is torch.Tensor:
                self._byte_blanks[device] = torch.empty(0, dtype=torch.uint8, device=device)
            return flat
        return view_of_storage(blank, storage, start, (end - start,), (1,))

    def _rows_to_encode(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        span: tuple[int, int],
        codec: Codec,
    ) -> torch.Tensor | None:
        """View a storage's bytes as a codec reads them; None if they must stay as they are."""
        if not codec.is_lossless and is_row_statistic(tensor, call.saved_shapes):
            return None
        rows = rows_view(tensor, storage, *span)
        if rows is None or not codec.accepts(tensor) or not codec.accepts(rows):
            return None
        return rows

    def _encode(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        layout: TensorLayout,
        slot: Slot,
        span: tuple[int, int],
        codec: Codec,
        rows: torch.Tensor,
    ) -> SavedStorage | None:
        """Encode *rows* and queue the copy of the payload; None if the host has no room."""
        encoded = codec.encode(rows)
        places, nbytes = place_parts(encoded.payload)
        host = self._pool.acquire(nbytes)
        if host is None:
            return None
        label, candidate = slot
        record = SavedStorage(
            call, label, span, candidate.nbytes, tensor, layout, host, self._on_release
        )
        record.let_go_of_source()
        record.codec, record.spec, record.parts = codec, encoded.spec, places
        record.payload = encoded.payload
        record.device_bytes = nbytes
        offload = self._transport.offload
        if is_profiling():
            offload = in_range(offload, "offload", label.layer)
        for part, target in zip(encoded.payload, part_targets(host.data, places), strict=True):
            source = part.contiguous().view(-1).view(torch.uint8)
            record.offload_ticket = offload(source, target, after=self._pool.barriers, label=label)
        return record
