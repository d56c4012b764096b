"""Queues the copies of saved storages to the host, encoded or as they are."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import torch

from hf_pyao.codecs import Codec
from hf_pyao.runtime.compute_streams import ComputeStreams, current_stream
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
from hf_pyao.runtime.recompute import RecomputedStorage
from hf_pyao.runtime.saved_tensor import SavedStorage
from hf_pyao.runtime.tape import LayerCall, Slot
from hf_pyao.runtime.transport import Transport
from hf_pyao.runtime.window import OffloadWindow
from hf_pyao.stores import HostPool

HOST_FULL = "host memory full"


class StorageOffloader:
    """Writes saved storages to the host.

    Args:
        transport: copies bytes.
        pool: host memory.
        window: device copies that wait to leave.
        streams: the compute streams seen so far.
        on_release: called with each storage that no graph node can ask for any more, from its
            destructor.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        pool: HostPool,
        window: OffloadWindow,
        streams: ComputeStreams,
        on_release: Callable[[SavedStorage], None],
    ) -> None:
        self._transport = transport
        self._pool = pool
        self._window = window
        self._streams = streams
        self._on_release = on_release
        self._byte_blanks: dict[torch.device, torch.Tensor] = {}

    def offload(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        layout: TensorLayout,
        slot: Slot,
        codec: Codec,
    ) -> SavedStorage | None:
        """Move *tensor*'s storage to the host; None if the host has no room.

        The copy is queued now, or at the end of the layer: see [Note: Regions of a storage].

        Args:
            call: the layer call that saves it.
            tensor: what autograd saves, plain and strided, on a device that the transport handles.
            layout: that of *tensor*.
            slot: its slot in the layer.
            codec: how to write it, if the codec takes it; else its bytes go as they are.
        """
        nbytes = slot.candidate.nbytes
        is_all = layout.is_dense and layout.nbytes == nbytes
        span = (0, nbytes) if is_all else range_to_move(tensor, nbytes)
        record = SavedStorage(call, slot.label, span, nbytes, tensor, layout, self._on_release)
        if is_all or (layout.is_dense and not record.is_whole):
            if not self._queue(record, codec):
                return None
            call.records.append(weakref.ref(record))
        else:
            stream = current_stream(record.device)
            if stream is not None:
                record.home = self._streams.home_on(stream)
            record.put_off(functools.partial(self._queue_late, codec=codec))
            ref = weakref.ref(record)
            call.records.append(ref)
            call.put_off.append(ref)
        return record

    def _queue_late(self, record: SavedStorage, codec: Codec) -> None:
        """Queue the copy of *record*; where the host has no room, it stays where it is."""
        home = record.home
        if home is not None:
            home.meet_visitors()  # they may have filled other regions
        with nullcontext() if home is None else home.stream:
            is_queued = self._queue(record, codec)
        if not is_queued:
            record.call.tape.stats.kept_bytes[HOST_FULL] += record.nbytes

    def _queue(self, record: SavedStorage, codec: Codec) -> bool:
        """Queue the copy of *record* to the host; say whether the host has room for it."""
        if codec.name != "identity":
            rows = self._rows_to_encode(record, codec)
            if rows is not None:
                return self._queue_encoded(record, codec, rows)
        pool = self._pool
        host = pool.acquire(record.nbytes)
        if host is None:
            return False
        record.host = host
        layout = record.layout
        source = record.source
        if layout.is_copied_as_it_is and layout.nbytes == record.nbytes and record.is_whole:
            target = record.host_view = host.view_like(layout)
        else:
            source = self._flat(source, record.start, record.start + record.nbytes)
            target = host.data
        record.payload = (source,)
        offload = self._transport.offload
        if is_profiling():
            offload = in_range(offload, "offload", record.slot.layer)
        record.offload_ticket = offload(source, target, after=pool.barriers, label=record.slot)
        self._count(record)
        return True

    def _queue_encoded(self, record: SavedStorage, codec: Codec, rows: torch.Tensor) -> bool:
        """Encode *rows* and queue the copy of the payload; say whether the host has room for it."""
        encoded = codec.encode(rows)
        places, nbytes = place_parts(encoded.payload)
        host = self._pool.acquire(nbytes)
        if host is None:
            return False
        record.host = host
        record.let_go_of_source()
        record.codec, record.spec, record.parts = codec, encoded.spec, places
        record.payload = encoded.payload
        record.device_bytes = nbytes
        offload = self._transport.offload
        if is_profiling():
            offload = in_range(offload, "offload", record.slot.layer)
        for part, target in zip(encoded.payload, part_targets(host.data, places), strict=True):
            flat = part.contiguous().view(-1).view(torch.uint8)
            record.offload_ticket = offload(
                flat, target, after=self._pool.barriers, label=record.slot
            )
        self._count(record)
        if self._streams.are_several:
            self._window.let_go(record, rows.untyped_storage())
        return True

    def let_go_of_dropped(self, record: RecomputedStorage, storage: torch.UntypedStorage) -> None:
        """Let go of *storage*, the source of *record*, which is not copied but rebuilt."""
        stream = current_stream(record.device)
        if stream is None:
            return
        replay = record.call.replay
        assert replay is not None
        if replay.stream is None:
            replay.stream = stream
        record.home = self._streams.home_on(replay.stream)
        record.home.note_visitor()
        self._window.let_go(record, storage)

    def _count(self, record: SavedStorage) -> None:
        """Count *record*, whose copy is queued, and let the window hold its device copy."""
        stats = record.call.tape.stats
        stats.offloaded_bytes += record.nbytes
        stats.link_bytes += record.device_bytes
        if record.home is None:
            record.home = self._streams.home_of(record.offload_ticket)
        self._window.add(record, record.device_bytes)

    def _flat(self, tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """View bytes of *tensor*'s storage as a flat uint8 tensor; nothing is copied."""
        storage, device = tensor.untyped_storage(), tensor.device
        blank = self._byte_blanks.get(device)
        if blank is None or type(tensor) is not torch.Tensor:
            flat = bytes_view(storage, device, start, end)
            if type(tensor) is torch.Tensor:
                self._byte_blanks[device] = torch.empty(0, dtype=torch.uint8, device=device)
            return flat
        return view_of_storage(blank, storage, start, (end - start,), (1,))

    def _rows_to_encode(self, record: SavedStorage, codec: Codec) -> torch.Tensor | None:
        """View a storage's bytes as a codec reads them; None if they must stay as they are."""
        tensor = record.source
        if not codec.is_lossless and is_row_statistic(tensor, record.call.saved_shapes):
            return None
        start, end = record.start, record.start + record.nbytes
        rows = rows_view(tensor, tensor.untyped_storage(), start, end)
        if rows is None or not codec.accepts(tensor) or not codec.accepts(rows):
            return None
        return rows
