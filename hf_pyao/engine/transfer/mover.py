"""Moves byte ranges to a tier and back: the only part that knows where bytes may be.

A caller gives bytes away with :meth:`Mover.offload` and gets them back with
:meth:`Mover.read`, wherever they are by then. [Note: Stream order] in ``transport`` says when
which copy is queued, and when memory is released.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from hf_pyao.engine.codecs import Codec
from hf_pyao.engine.stores import HOST_FULL, Buffer
from hf_pyao.engine.transfer.compute_streams import current_stream, visitor_of
from hf_pyao.engine.transfer.layout import (
    ByteViews,
    TensorLayout,
    byte_offset,
    has_bytes,
    part_targets,
    parts_view,
    place_parts,
    range_to_move,
)
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.meter import Label, LinkMeter, Meter, MoverMeter
from hf_pyao.engine.transfer.moved_bytes import HERE, OFFLOADING, RELOADING, MovedBytes
from hf_pyao.engine.transfer.profiler_ranges import in_range, is_profiling
from hf_pyao.engine.transfer.reload_schedule import ReloadSchedule
from hf_pyao.engine.transfer.tiers import Tier
from hf_pyao.engine.transfer.transport import DoneTicket, LinkTimes
from hf_pyao.engine.transfer.watcher import CopyWatcher
from hf_pyao.errors import ReleasedTensorError


class Mover(ReloadSchedule):
    """Moves bytes over one link for one engine.

    Args:
        link: the tiers and window that are used; may be shared.

    It is not thread-safe on the way back: whoever calls :meth:`start_backward`, :meth:`read` and
    :meth:`drop_device_copy` from several threads holds a lock of their own. :meth:`release` runs in
    destructors and takes none.
    """

    def __init__(self, link: LinkContext) -> None:
        self.link = link
        super().__init__(link.offloads)
        link.join(self)
        self.times = LinkTimes()
        """What the copies took that were queued since the last micro-batch was counted."""
        self._tiers = tuple((tier, tier.store.new_use()) for tier in link.tiers)
        """Where bytes go, the nearest first, and what this engine uses there."""
        self.watcher: CopyWatcher | None = None
        """Is told of copies and codecs, if anyone is to be."""
        self.is_watched = False
        """True if someone is to hear of copies: the watcher, or a profiler."""
        self._offloads = link.offloads
        self._new_items = link.offloads.new_items
        self._bytes = ByteViews()

    def tell(self, watcher: CopyWatcher | None) -> None:
        """Tell *watcher* of copies and codecs from here on; None: nobody."""
        self.watcher = watcher

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
        label: Label,
        meter: Meter,
    ) -> MovedBytes | None:
        """Move the storage of *source* to the first tier that has room for it.

        None if no tier has: the bytes stay, and *meter* counts them as kept.

        The copy is queued now; or, where *source* is a part of its storage with gaps, when
        :meth:`settle` is called, since what lies in the gaps may be written yet.

        Args:
            source: plain and strided, on a device that the transport handles; it is emptied once
                its bytes have left, so that it should be a tensor of the caller's own.
            layout: that of *source*.
            storage_nbytes: bytes of its storage. Where *source* is a small part, only that moves.
            codec: how to write it, if the codec takes it; else its bytes go as they are.
            label: names it in messages.
            meter: counts what is moved.
        """
        item = next(self._new_items)
        if layout.is_dense and layout.nbytes == storage_nbytes:
            moved = MovedBytes(self, item, source, layout, storage_nbytes, label, meter)
            is_late = False
        else:
            start, end = range_to_move(source, storage_nbytes)
            moved = MovedBytes(self, item, source, layout, end - start, label, meter)
            if end - start != storage_nbytes:
                moved.is_part_from(start)
            is_late = moved.is_whole or not layout.is_dense
        if is_late:
            moved.put_off(codec, current_stream(moved.device))
        elif not self._queue(moved, codec):
            _count_kept(meter, storage_nbytes)
            return None
        return moved

    def settle(self, moved: MovedBytes) -> None:
        """Queue the copy of *moved* if it was put off; without room in any tier, it stays."""
        codec = moved.late_codec
        if codec is None:
            return
        moved.no_longer_put_off()
        with nullcontext() if moved.home is None else moved.home:
            is_queued = self._queue(moved, codec)
        if not is_queued:
            _count_kept(moved.meter, moved.nbytes)

    def copy_again(self, moved: MovedBytes, tensor: torch.Tensor) -> bool:
        """Copy the bytes of *moved* anew; say whether that was done: in host memory alone.

        Where copies are queued, the link would carry the bytes twice.

        Args:
            moved: may have come back.
            tensor: on the same storage, which may hold other bytes by now.
        """
        host, tier, start = moved.host, moved.tier, moved.start
        is_done = type(moved.offload_ticket) is DoneTicket and moved.codec is None
        if not is_done or host is None or tier is None or not tier.store.is_host_memory:
            return False
        if type(tensor) is not torch.Tensor or not has_bytes(tensor):
            return False
        self.drop_device_copy(moved)
        host.data.copy_(self._bytes.of(tensor, start, start + moved.nbytes))
        return True

    def let_leave(self, moved: MovedBytes) -> bool:
        """Order compute behind the copy of *moved*, and let its source go; False without a copy."""
        self._offloads.drain(lambda other: other is moved)
        return moved.host is not None

    def _queue(self, moved: MovedBytes, codec: Codec) -> bool:
        """Queue the copy of *moved* to a tier; say whether one has room for it."""
        if codec.name != "identity":
            rows = moved.rows_to_encode(codec)
            if rows is not None:
                return self._queue_encoded(moved, codec, rows)
        nbytes = moved.nbytes
        for tier, use in self._tiers:  # `_acquire`, written out
            host = tier.store.acquire(nbytes, use)
            if host is not None:
                break
        else:
            return False
        layout = moved.layout
        source = moved.source
        if layout.is_copied_as_it_is and layout.nbytes == nbytes and moved.is_whole:
            view = target = host.view_like(layout)
        else:
            source = self._bytes.of(source, moved.start, moved.start + nbytes)
            view, target = None, host.data
        meter = moved.meter
        offload = tier.transport.offload
        if self.is_watched and is_profiling():
            offload = in_range(offload, "offload", moved.label.layer)
        try:
            ticket = offload(
                source, target, after=tier.store.barriers, label=moved.label, times=self.times
            )
            moved.is_leaving(tier, host, view, source, ticket)
            meter.offloaded_bytes += nbytes
            meter.link_bytes += nbytes
            self._offloads.add(moved)
        except BaseException:
            tier.transport.retire_all()  # an interrupt: it may be queued, and no one knows
            if moved.host is None:
                tier.store.release(host, None)
            raise
        if self.watcher is not None:  # when all is noted: it may raise
            self.watcher.on_copy("offload", moved.label, nbytes, ticket)
        return True

    def _queue_encoded(self, moved: MovedBytes, codec: Codec, rows: torch.Tensor) -> bool:
        """Encode *rows* and queue the copy of the payload; say whether a tier has room for it."""
        watcher = self.watcher
        if watcher is None:
            encoded = codec.encode(rows)
        else:
            encoded = watcher.around("encode", moved.label, lambda: codec.encode(rows))
        places, nbytes = place_parts(encoded.payload)
        place = self._acquire(nbytes)
        if place is None:
            return False
        tier, host = place
        moved.encode_as(codec, encoded.spec, encoded.payload, places, nbytes, tier, host)
        copies = []
        for part, target in zip(encoded.payload, part_targets(host.data, places), strict=True):
            self._copy_out(moved, tier, part.contiguous().view(-1).view(torch.uint8), target)
            copies.append((target.nbytes, moved.offload_ticket))
        meter = moved.meter
        meter.offloaded_bytes += moved.nbytes
        meter.link_bytes += nbytes
        self._offloads.add(moved)
        if watcher is not None:
            for part_bytes, ticket in copies:
                watcher.on_copy("offload", moved.label, part_bytes, ticket)
        return True

    def _acquire(self, nbytes: int) -> tuple[Tier, Buffer] | None:
        """Reserve *nbytes* in the first tier that has room for them; None if no tier has."""
        for tier, use in self._tiers:
            buffer = tier.store.acquire(nbytes, use)
            if buffer is not None:
                return tier, buffer
        return None

    def _copy_out(
        self, moved: MovedBytes, tier: Tier, source: torch.Tensor, target: torch.Tensor
    ) -> None:
        offload = tier.transport.offload
        if self.is_watched and is_profiling():
            offload = in_range(offload, "offload", moved.label.layer)
        try:
            ticket = offload(
                source, target, after=tier.store.barriers, label=moved.label, times=self.times
            )
            moved.copy_queued(ticket)
        except BaseException:
            tier.transport.retire_all()  # as in `_queue`
            raise

    # ---- back to the device --------------------------------------------------------------------

    def read(self, moved: MovedBytes) -> tuple[torch.UntypedStorage, int]:
        """Return the bytes on the device, and which byte of the original storage is the first.

        To be called on their home. Afterwards they count as used.
        """
        phase = moved.phase
        if phase is OFFLOADING:
            return self.read_payload(moved)
        if phase is not HERE:
            self.bring_here(moved)
        storage = moved.decoded
        if storage is None:
            storage = self.device_storage(moved)
        self.note_use(moved.item)
        return storage, moved.decoded_start

    def read_payload(self, moved: MovedBytes) -> tuple[torch.UntypedStorage, int]:
        """Read the device copy, which has not been let go yet. What is encoded is decoded once.

        Returns:
            A storage, and which byte of the original one is its first.
        """
        if moved.codec is None:
            return moved.payload[0].untyped_storage(), 0
        decoded = moved.decoded
        if decoded is None:
            tensor = self._decode(moved, moved.codec, moved.payload)
            decoded = tensor.untyped_storage()
            moved.decoded_as(decoded, moved.start - byte_offset(tensor))
        return decoded, moved.decoded_start

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
        if home is None or visitor_of(home) is None:
            self._queue_reload(moved)
        else:
            with home:
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
        buffer = moved.new_device_buffer()
        transport = moved.transport
        reload = transport.reload
        if self.is_watched and is_profiling():
            reload = in_range(reload, "reload", moved.label.layer)
        try:
            ticket = reload(
                source, buffer, after=(moved.offload_ticket,), label=moved.label, times=self.times
            )
            moved.reload_queued(buffer, ticket)
        except BaseException:
            transport.retire_all()  # as in `_queue`: the buffer is let go, and written to
            raise
        self.note_reload(moved.item, moved.device_bytes)
        meter = moved.meter
        meter.reloaded_bytes += moved.nbytes
        meter.link_bytes += moved.device_bytes
        if self.watcher is not None:
            self.watcher.on_copy("reload", moved.label, moved.device_bytes, ticket)

    def bring_here(self, moved: MovedBytes) -> None:
        """Let compute read *moved* on the device from here on, wherever its bytes are.

        To be called on its home.

        Raises:
            ReleasedTensorError: the buffers were given back.
        """
        if moved.phase is not RELOADING:
            self._queue_reload(moved)
        moved.transport.wait(moved.reload_ticket)  # as :meth:`wait` does
        moved.has_come()

    def wait(self, moved: MovedBytes) -> None:
        """Order the home of *moved* behind its reload, if one is under way."""
        if moved.phase is RELOADING:
            moved.transport.wait(moved.reload_ticket)
            moved.has_come()

    def drop_device_copy(self, moved: MovedBytes) -> None:
        """Let go of the reloaded copy; the tier still has the bytes."""
        if moved.phase is RELOADING:
            moved.transport.retire(moved.reload_ticket)
        elif not moved.is_here:
            return
        self.note_use(moved.item)
        moved.drop_device_copy()

    # ---- the end -------------------------------------------------------------------------------

    def release(self, moved: MovedBytes) -> None:
        """Give back the buffers of what no one can ask for any more.

        Runs in a destructor: on any thread and inside any other call, so it takes no lock.
        """
        phase = moved.phase
        if phase is OFFLOADING:
            self._offloads.end(moved.item)
        elif phase is RELOADING:
            moved.transport.retire(moved.reload_ticket)
            self.note_use(moved.item)
        # The newest copy that uses the host buffer stands for the one before.
        last = moved.offload_ticket if moved.reload_ticket is None else moved.reload_ticket
        tier, host = moved.tier, moved.release()
        if tier is not None and host is not None:
            tier.store.release(host, last)

    def collect_times(self, meter: LinkMeter, times: LinkTimes) -> None:
        """Move *times* into *meter*, with those of copies that are known by now to be done."""
        for transport in self.link.tiers.transports:
            transport.collect(meter, times)

    def collect(self, meter: MoverMeter) -> LinkTimes:
        """End a micro-batch: note in *meter* what its copies took, and its peak on the host.

        Returns:
            Where its other copies are timed: a host that runs ahead knows of few that are done.
        """
        times, self.times = self.times, LinkTimes()
        self.collect_times(meter, times)
        meter.host_peak_bytes = meter.disk_peak_bytes = 0
        for tier, use in self._tiers:
            peak_bytes = tier.store.take_peak(use)
            if tier.store.is_host_memory:
                meter.host_peak_bytes += peak_bytes
            else:
                meter.disk_peak_bytes += peak_bytes
                tier.store.collect(meter)
        meter.pool_bytes = self.link.tiers.pool_bytes
        return times


def _count_kept(meter: Meter, nbytes: int) -> None:
    """Count *nbytes* that stay on the device, since no tier has room for them."""
    meter.kept_bytes[HOST_FULL] += nbytes
