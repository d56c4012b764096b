"""Moves byte ranges to the host and back: the only one who knows where bytes may be.

A caller gives bytes away with :meth:`Mover.offload` and gets them back with
:meth:`Mover.read`, whatever became of them meanwhile. When which copy is queued, and whose
memory is let go behind what, is in [Note: Stream order] in ``transport``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any, Protocol, TypeAlias

import torch

from hf_pyao.engine.codecs import Codec
from hf_pyao.engine.transfer.layout import (
    TensorLayout,
    byte_offset,
    bytes_view,
    part_targets,
    parts_view,
    place_parts,
    range_to_move,
    rows_view,
    view_of_storage,
)
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.moved_bytes import DEVICE, HOST, OFFLOADING, RELOADING, MovedBytes
from hf_pyao.engine.transfer.profiler_ranges import in_range, is_profiling
from hf_pyao.engine.transfer.schedule import Schedule
from hf_pyao.engine.transfer.transport import LinkTimes
from hf_pyao.engine.transfer.watcher import CopyWatcher
from hf_pyao.errors import ReleasedTensorError
from hf_pyao.metrics import MicroBatchStats

Group: TypeAlias = "Iterable[weakref.ref[Any]]"
"""Weak references on what stands for moved bytes (:class:`HasMoved`)."""

HOST_FULL = "host memory full"


class HasMoved(Protocol):
    """What stands for moved bytes, and dies with them."""

    @property
    def moved(self) -> MovedBytes:
        """The bytes."""
        ...


class Mover(Schedule):
    """Moves bytes over one link for one engine.

    Args:
        link: the transport, host memory and window that are used; may be shared.

    It is not thread-safe on the way back: whoever calls :meth:`start_backward`, :meth:`read` and
    :meth:`drop_device_copy` from several threads holds a lock of their own. :meth:`release` runs in
    destructors and takes none.
    """

    def __init__(self, link: LinkContext) -> None:
        self.link = link
        super().__init__(link.offloads)
        link.join(self)
        self._coming: dict[int, weakref.ref[HasMoved]] = {}
        """What the schedule may bring back, by item."""
        self.times = LinkTimes()
        """What the copies took that were queued since the last micro-batch was counted."""
        self.host_use = link.pool.new_use()
        """Host memory that this engine uses."""
        self.watcher: CopyWatcher | None = None
        """Is told of copies and codecs, if anyone is to be."""
        self.is_watched = False
        """True if someone is to hear of copies: the watcher, or a profiler."""
        self._transport = link.transport
        self._pool = link.pool
        self._offloads = link.offloads
        self._new_items = link.offloads.new_items
        self._streams = link.streams
        self._byte_blanks: dict[torch.device, torch.Tensor] = {}

    def look_for_watchers(self) -> None:
        """Look whether a profiler runs, for what follows: too dear to be asked for each tensor."""
        self.is_watched = self.watcher is not None or is_profiling()

    # ---- to the host ---------------------------------------------------------------------------

    def offload(
        self,
        source: torch.Tensor,
        layout: TensorLayout,
        storage_nbytes: int,
        codec: Codec,
        label: object,
        stats: MicroBatchStats,
    ) -> MovedBytes | None:
        """Move the storage of *source* to the host; None if the host has no room.

        The copy is queued now; or, where *source* is a part of its storage with gaps, when
        :meth:`settle` is called, since what lies in the gaps may be written yet.

        Args:
            source: plain and strided, on a device that the transport handles; it is emptied once
                its bytes have left, so that it should be a tensor of the caller's own.
            layout: that of *source*.
            storage_nbytes: bytes of its storage. Where *source* is a small part, only that moves.
            codec: how to write it, if the codec takes it; else its bytes go as they are.
            label: names it in messages.
            stats: counts what is moved.
        """
        item = next(self._new_items)
        if layout.is_dense and layout.nbytes == storage_nbytes:
            moved = MovedBytes(self, item, source, layout, storage_nbytes, label, stats)
            return moved if self._queue(moved, codec) else None
        start, end = range_to_move(source, storage_nbytes)
        moved = MovedBytes(self, item, source, layout, end - start, label, stats)
        if end - start != storage_nbytes:
            moved.is_part_from(start)
            if layout.is_dense:
                return moved if self._queue(moved, codec) else None
        moved.put_off(codec, self._streams.home_here(moved.device))
        return moved

    def settle(self, moved: MovedBytes) -> None:
        """Queue the copy of *moved* if it was put off; without room on the host, it stays."""
        codec = moved.late_codec
        if codec is None:
            return
        moved.no_longer_put_off()
        home = moved.home
        if home is not None:
            home.meet_visitors()  # they may have filled other regions
        with nullcontext() if home is None else home.stream:
            is_queued = self._queue(moved, codec)
        if not is_queued:
            moved.stats.kept_bytes[HOST_FULL] += moved.nbytes

    def let_leave(self, moved: MovedBytes) -> bool:
        """Order compute behind the copy of *moved*, and let its source go; False without a copy."""
        self._offloads.drain(lambda other: other is moved)
        return moved.host is not None

    def _queue(self, moved: MovedBytes, codec: Codec) -> bool:
        """Queue the copy of *moved* to the host; say whether the host has room for it."""
        if codec.name != "identity":
            rows = _rows_to_encode(moved, codec)
            if rows is not None:
                return self._queue_encoded(moved, codec, rows)
        pool = self._pool
        nbytes = moved.nbytes
        host = pool.acquire(nbytes, self.host_use)
        if host is None:
            return False
        layout = moved.layout
        source = moved.source
        if layout.is_copied_as_it_is and layout.nbytes == nbytes and moved.is_whole:
            target = host.view_like(layout)
            moved.take_host(host, target, source)
        else:
            source = self._flat(source, moved.start, moved.start + nbytes)
            target = host.data
            moved.take_host(host, None, source)
        stats = moved.stats
        try:
            if self.is_watched:
                self._copy_out(moved, source, target)
            else:  # the same, written out
                ticket = self._transport.offload(
                    source, target, after=pool.barriers, label=moved.label, times=self.times
                )
                moved.copy_queued(ticket)
                if ticket.compute is not None and moved.home is None:
                    moved.live_at(self._streams.home_on(ticket.compute))
            stats.offloaded_bytes += nbytes
            stats.link_bytes += nbytes
            self._offloads.add(moved)
        except BaseException:
            self._transport.retire_all()  # an interrupt: it may be queued, and no one knows
            raise
        if self.watcher is not None:  # when all is noted: it may raise
            self.watcher.on_copy("offload", moved.label, nbytes, moved.offload_ticket)
        return True

    def _queue_encoded(self, moved: MovedBytes, codec: Codec, rows: torch.Tensor) -> bool:
        """Encode *rows* and queue the copy of the payload; say whether the host has room for it."""
        watcher = self.watcher
        if watcher is None:
            encoded = codec.encode(rows)
        else:
            encoded = watcher.around("encode", moved.label, lambda: codec.encode(rows))
        places, nbytes = place_parts(encoded.payload)
        host = self._pool.acquire(nbytes, self.host_use)
        if host is None:
            return False
        moved.encode_as(codec, encoded.spec, encoded.payload, places, nbytes, host)
        copies = []
        for part, target in zip(encoded.payload, part_targets(host.data, places), strict=True):
            self._copy_out(moved, part.contiguous().view(-1).view(torch.uint8), target)
            copies.append((target.nbytes, moved.offload_ticket))
        stats = moved.stats
        stats.offloaded_bytes += moved.nbytes
        stats.link_bytes += nbytes
        self._offloads.add(moved)
        if self._streams.are_several:
            moved.linger(self._streams.let_go(moved.home, rows.untyped_storage()))
        if watcher is not None:
            for part_bytes, ticket in copies:
                watcher.on_copy("offload", moved.label, part_bytes, ticket)
        return True

    def _copy_out(self, moved: MovedBytes, source: torch.Tensor, target: torch.Tensor) -> None:
        offload = self._transport.offload
        if self.is_watched and is_profiling():
            offload = in_range(offload, "offload", _layer_of(moved))
        try:
            ticket = offload(
                source, target, after=self._pool.barriers, label=moved.label, times=self.times
            )
            moved.copy_queued(ticket)
        except BaseException:
            self._transport.retire_all()  # as in `_queue`
            raise
        if moved.home is None and ticket.compute is not None:
            moved.live_at(self._streams.home_on(ticket.compute))

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

    # ---- back to the device --------------------------------------------------------------------

    def start_backward(self, own: Group, others: Iterator[Group]) -> None:
        """Bring back what backward asks for, ahead of it; see [Note: Window] in ``transport``.

        Args:
            own: what the layer call moved whose backward begins, in the order in which backward
                asks for it.
            others: the same of the calls that follow.
        """
        coming = self._coming
        coming.clear()
        self.start(_items(own, coming), (_items(each, coming) for each in others))

    def is_away(self, item: int) -> bool:
        """Say whether *item* is on the host alone, and can still be asked for."""
        holder = self._coming[item]()
        return holder is not None and holder.moved.residency is HOST

    def bring_back(self, item: int) -> None:
        """Queue the copy of *item* to the device, ahead of its use."""
        holder = self._coming[item]()
        assert holder is not None
        self.reload(holder.moved)

    def await_reload(self, item: int) -> None:
        """Order compute behind the copy of *item* to the device, if one is under way."""
        holder = self._coming[item]()
        if holder is not None:
            self.wait(holder.moved)

    def read(self, moved: MovedBytes) -> tuple[torch.UntypedStorage, int]:
        """Return the bytes on the device, and which byte of the original storage is the first.

        Afterwards they count as used.
        """
        home = moved.home
        visitor = None if home is None else home.visitor()
        if visitor is None:
            return self._read(moved)
        assert home is not None
        with home.stream:
            loaded = self._read(moved)
        home.receive(visitor)
        return loaded

    def _read(self, moved: MovedBytes) -> tuple[torch.UntypedStorage, int]:
        if moved.residency is OFFLOADING:
            return self.read_payload(moved)
        if moved.residency is HOST:
            self.reload(moved)
        self.wait(moved)
        storage = self.device_storage(moved)
        self.note_use(moved.item)
        return storage, moved.decoded_start

    def read_payload(self, moved: MovedBytes) -> tuple[torch.UntypedStorage, int]:
        """Read the device copy, which has not been let go yet.

        Returns:
            A storage, and which byte of the original one is its first.
        """
        if moved.codec is None:
            return moved.payload[0].untyped_storage(), 0
        decoded = self._decode(moved, moved.codec, moved.payload)
        return decoded.untyped_storage(), moved.start - byte_offset(decoded)

    def device_storage(self, moved: MovedBytes) -> torch.UntypedStorage:
        """Return the bytes on the device, decoding them first if need be.

        Decoding waits until the bytes are consumed, so that what was brought back ahead takes only
        its encoded size (PyAO paper, section 4.3).
        """
        decoded = moved.decoded
        if decoded is None:
            buffer = moved.buffer
            assert buffer is not None
            if moved.codec is None:
                decoded = buffer.untyped_storage()
                moved.decoded_as(decoded, moved.decoded_start)
            else:
                tensor = self._decode(moved, moved.codec, parts_view(buffer, moved.parts))
                decoded = tensor.untyped_storage()
                moved.decoded_as(decoded, moved.start - byte_offset(tensor))
        return decoded

    def _decode(
        self, moved: MovedBytes, codec: Codec, payload: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        if self.watcher is None:
            return codec.decode(payload, moved.spec)
        return self.watcher.around("decode", moved.label, lambda: codec.decode(payload, moved.spec))

    def reload(self, moved: MovedBytes) -> None:
        """Queue the copy back to the device, into memory of the home's.

        Raises:
            ReleasedTensorError: the buffers were given back.
        """
        home = moved.home
        if home is None or home.visitor() is None:
            self._queue_reload(moved)
        else:
            with home.stream:
                self._queue_reload(moved)

    def _queue_reload(self, moved: MovedBytes) -> None:
        host = moved.host
        if host is None:
            raise ReleasedTensorError(
                f"{moved.label}: its buffers were given back while a graph still held it. Run "
                "backward before detaching the offloader."
            )
        source = moved.host_view
        if source is None:
            source = host.data
        buffer = _device_buffer(moved)
        moved.reload_queued(buffer)
        reload = self._transport.reload
        if self.is_watched and is_profiling():
            reload = in_range(reload, "reload", _layer_of(moved))
        try:
            ticket = reload(
                source, buffer, after=(moved.offload_ticket,), label=moved.label, times=self.times
            )
            moved.is_reloaded_by(ticket)
        except BaseException:
            self._transport.retire_all()  # as in `_queue`: the buffer is let go, and written to
            raise
        self.note_reload(moved.item, moved.device_bytes)
        stats = moved.stats
        stats.reloaded_bytes += moved.nbytes
        stats.link_bytes += moved.device_bytes
        if self.watcher is not None:
            self.watcher.on_copy("reload", moved.label, moved.device_bytes, ticket)

    def wait(self, moved: MovedBytes) -> None:
        """Order the home of *moved* behind its reload, if one is under way."""
        if moved.residency is RELOADING:
            self._transport.wait(moved.reload_ticket)
            moved.has_come()

    def drop_device_copy(self, moved: MovedBytes) -> None:
        """Let go of the reloaded copy; the host still has the bytes."""
        if moved.residency is RELOADING:
            self._retire(moved)
        elif moved.residency is not DEVICE:
            return
        self.note_use(moved.item)
        if moved.home is not None:
            moved.home.await_visitors()
        moved.drop_device_copy()

    def _retire(self, moved: MovedBytes) -> None:
        if moved.reload_ticket is not None:  # else an interrupt came before it was queued
            self._transport.retire(moved.reload_ticket)

    # ---- the end -------------------------------------------------------------------------------

    def release(self, moved: MovedBytes) -> None:
        """Give back the buffers of what no one can ask for any more.

        Runs in a destructor: on any thread and inside any other call, so it takes no lock.
        """
        residency = moved.residency
        if residency is OFFLOADING:
            self._offloads.end(moved.item)
        elif residency is RELOADING:
            self._retire(moved)
            self.note_use(moved.item)
        home = moved.home
        if home is not None:
            if moved.lingering is not None and moved.lingering.is_held:
                home.await_everywhere()
            else:
                home.await_visitors()
        # The newest copy that uses the host buffer stands for the one before.
        last = moved.offload_ticket if moved.reload_ticket is None else moved.reload_ticket
        host = moved.release()
        if host is not None:
            self._pool.release(host, last)

    def collect_times(self, stats: MicroBatchStats, times: LinkTimes) -> None:
        """Move *times* into *stats*, with those of copies that are known by now to be done."""
        self._transport.collect(stats, times)

    def collect(self, stats: MicroBatchStats) -> LinkTimes:
        """End a micro-batch: note in *stats* what its copies took, and its peak on the host.

        Returns:
            Where its other copies are timed: a host that runs ahead knows of few that are done.
        """
        times, self.times = self.times, LinkTimes()
        self.collect_times(stats, times)
        stats.host_peak_bytes = self._pool.take_peak(self.host_use)
        stats.pool_bytes = self._pool.pool_bytes
        return times


def _items(group: Group, coming: dict[int, weakref.ref[HasMoved]]) -> list[int]:
    """Return the ids of what *group* stands for; note in *coming* what stands for each."""
    items = []
    for ref in group:
        holder = ref()
        if holder is not None:
            item = holder.moved.item
            coming[item] = ref
            items.append(item)
    return items


def _layer_of(moved: MovedBytes) -> str:
    return str(getattr(moved.label, "layer", moved.label))


def _rows_to_encode(moved: MovedBytes, codec: Codec) -> torch.Tensor | None:
    """View a storage's bytes as a codec reads them; None if they must stay as they are."""
    tensor = moved.source
    start, end = moved.start, moved.start + moved.nbytes
    rows = rows_view(tensor, tensor.untyped_storage(), start, end)
    if rows is None or not codec.accepts(tensor) or not codec.accepts(rows):
        return None
    return rows


def _device_buffer(moved: MovedBytes) -> torch.Tensor:
    """Allocate what the payload of *moved* is brought back to, on the current stream."""
    if moved.host_view is None:
        return torch.empty(moved.device_bytes, dtype=torch.uint8, device=moved.device)
    layout = moved.layout
    return layout.blank.new_empty_strided(layout.size, layout.stride)
