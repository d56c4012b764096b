"""Moves byte ranges to a tier and back: the only part that knows where bytes may be.

A caller gives bytes away with :meth:`Mover.offload` and gets them back with :meth:`Mover.read`,
wherever they are by then. [Note: Stream order] in ``transport`` says when which copy is queued, and
when memory is released.

Ownership runs one way: a graph node may ask for :class:`MovedBytes`, and that holds the buffers.
The mover refers to it weakly, so a buffer lives exactly as long as someone may ask for it. What a
copy uses is noted before the copy is queued. An interrupt in between leaves bytes without a ticket:
whoever lets go of these orders compute behind all copies first.
"""

from __future__ import annotations

import enum
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from hf_pyao.engine.codecs import Codec
from hf_pyao.engine.codecs.base import Encoded
from hf_pyao.engine.stores import HOST_FULL, Buffer
from hf_pyao.engine.transfer.compute_streams import current_stream, visitor_of
from hf_pyao.engine.transfer.layout import (
    PartPlace,
    TensorLayout,
    byte_offset,
    bytes_view,
    has_bytes,
    part_targets,
    parts_view,
    place_parts,
    range_to_move,
    rows_view,
    view_of_storage,
)
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.profiler_ranges import in_range, is_profiling
from hf_pyao.engine.transfer.schedule import Schedule
from hf_pyao.engine.transfer.tiers import Tier
from hf_pyao.engine.transfer.transport import DoneTicket, LinkTimes, Transport
from hf_pyao.errors import InternalError, ReleasedTensorError
from hf_pyao.metrics import MicroBatchStats

if TYPE_CHECKING:
    from hf_pyao.engine.runtime.observer import Observer


class Phase(enum.IntEnum):
    """How far the bytes are on their way to a tier and back. Which tier it is, is told apart."""

    OFFLOADING = 0
    """The device copy is held: the copy to the tier is queued, or put off; compute is not ordered
    behind it yet."""
    AWAY = 1
    """Only the tier's buffer holds them: no device memory."""
    RELOADING = 2
    """A device buffer is allocated and the copy into it queued."""
    HERE = 3
    """Compute is ordered behind the reload and may read the device buffer."""
    RELEASED = 4
    """Buffers are given back; asking for the bytes is an error."""


OFFLOADING, AWAY, RELOADING, HERE, RELEASED = Phase
"""The same, for hot paths: to ask an enum for a member takes several times as long."""

_LEGAL = (
    (AWAY, RELEASED),
    (RELOADING, RELEASED),
    (HERE, AWAY, RELEASED),
    (AWAY, RELEASED),
    (),
)
"""The phases that may follow each phase, in the order of the enum."""

Group: TypeAlias = "Iterable[weakref.ref[Any]]"
"""Weak references on moved bytes."""


class MovedBytes:
    """One byte range of a storage, which was moved or is to be.

    ``start`` is the byte offset of the range inside the original storage, a multiple of 64, so
    that rebuilt views keep their alignment: on a CPU alignment alone changes matrix products.
    """

    # What most of these still have when they go is left to the class: they are made in the hottest
    # path there is.
    codec: Codec | None = None
    """None where the bytes were moved as they are."""
    spec: Any = None
    parts: tuple[PartPlace, ...] = ()
    payload: tuple[torch.Tensor, ...] = ()
    """What is being copied to the host; empty once compute is ordered behind the copy."""
    tier: Tier
    """Where they go, or went; set with :attr:`host`."""
    transport: Transport
    """Who copies them; set with :attr:`host`."""
    host: Buffer | None = None
    """The tier's buffer; None until a tier has made room."""
    host_view: torch.Tensor | None = None
    """The host buffer with the layout of the tensor, where that was copied as it is; else None, and
    bytes are copied."""
    buffer: torch.Tensor | None = None
    """Reloaded payload, on the device: laid out as ``host_view``, or uint8 and flat."""
    decoded: torch.UntypedStorage | None = None
    """Bytes ``start`` to ``start + nbytes`` of the original storage, on the device."""
    decoded_start: int = 0
    """Byte of the original storage that ``decoded`` begins with."""
    offload_ticket: Any = None
    reload_ticket: Any = None
    start: int = 0
    is_whole: bool = True
    """True if the whole storage is in here."""
    phase: Phase = OFFLOADING
    home: torch.Stream | None = None
    """The compute stream that its memory belongs to; None on a CPU. See [Note: Stream order]."""
    late_codec: Codec | None = None
    """While the copy to the host is put off: how it will be written."""
    mover: Mover
    """Takes the buffers back."""

    def __init__(
        self,
        mover: Mover,
        source: torch.Tensor,
        layout: TensorLayout,
        storage_nbytes: int,
        label: Any,
        meter: MicroBatchStats,
    ) -> None:
        """Stand for bytes that are where they were, until :meth:`Mover.offload` moves them.

        Args:
            mover: moves them.
            source: plain and strided, on a device that the transport handles; it is emptied once
                its bytes have left, so that it should be a tensor of the caller's own.
            layout: that of *source*.
            storage_nbytes: bytes of its storage.
            label: names it in messages (``str()`` of it), and its ``layer`` in a profiler's ranges.
            meter: counts what is moved.
        """
        self.item = next(mover.link.new_items)
        """Its id in the link's schedule."""
        self.source = source
        self.layout = layout
        self.label = label
        self.meter = meter
        self.nbytes = self.device_bytes = storage_nbytes
        """``device_bytes``: what the payload takes on the device when it is brought back."""
        self.mover = mover  # last: an interrupt may come before, and the destructor asks for it

    def to(self, phase: Phase) -> None:
        """Change to *phase*; only the transitions in the life of a buffer are legal.

        The hot paths check the usual transition themselves.
        """
        if phase not in _LEGAL[self.phase]:
            raise InternalError(
                f"{self.label}: illegal transition {self.phase.name} -> {phase.name}"
            )
        self.phase = phase

    def source_has_left(self) -> None:
        """Let go of the device copy: compute is ordered behind the copy to the host."""
        # First: an interrupt may come, and the bytes are looked for where it says.
        if self.phase is OFFLOADING:
            self.phase = AWAY
        else:
            self.to(AWAY)
        self.payload = ()
        if self.decoded is not None:
            self.decoded = None
        self.source.data = self.layout.blank  # it goes on sharing its version counter

    def new_device_buffer(self) -> torch.Tensor:
        """Allocate what the payload is brought back to, on the current stream."""
        blank = self.layout.blank
        if self.host_view is None:
            return torch.empty(self.device_bytes, dtype=torch.uint8, device=blank.device)
        return blank.new_empty_strided(self.layout.size, self.layout.stride)

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Give the buffers back once no one can ask for them any more."""
        mover: Mover | None = vars(self).get("mover")  # None: an interrupt came as it was made
        if mover is not None and self.phase is not RELEASED and not _is_finalizing():
            mover.release(self)


class Mover(Schedule):
    """Moves bytes over one link for one engine, and brings them back ahead of their use.

    Args:
        link: the tiers and window that are used; may be shared.

    It is not thread-safe on the way back: whoever calls :meth:`start_backward`, :meth:`read` and
    :meth:`drop_device_copy` from several threads holds a lock of their own. :meth:`release` runs in
    destructors and takes none.
    """

    def __init__(self, link: LinkContext) -> None:
        super().__init__(link)
        self.link = link
        link.join(self)
        self.times = LinkTimes()
        """What the copies took that were queued since the last micro-batch was counted."""
        self._tiers = tuple((tier, tier.store.new_use()) for tier in link.tiers)
        """Where bytes go, the nearest first, and what this engine uses there."""
        self.observer: Observer | None = None
        """Is told of copies and codecs, if anyone is to be."""
        self.is_watched = False
        """True if someone is to hear of copies: the observer, or a profiler."""
        self._coming: dict[int, weakref.ref[MovedBytes]] = {}
        """What may be brought back, by item."""

    def tell(self, observer: Observer | None) -> None:
        """Tell *observer* of copies and codecs from here on; None: nobody."""
        self.observer = observer

    def look_for_watchers(self) -> None:
        """Look whether a profiler runs, for what follows: too dear to be asked for each tensor."""
        self.is_watched = self.observer is not None or is_profiling()

    # ---- to the host ---------------------------------------------------------------------------

    def offload(self, moved: MovedBytes, codec: Codec) -> bool:
        """Move the storage of *moved* to the first tier that has room for it.

        The copy is queued now; or, where its source is a part of its storage with gaps, when
        :meth:`settle` is called, since what lies in the gaps may be written yet.

        Args:
            moved: new. Where its source is a small part of the storage, only that part moves.
            codec: how to write it, if the codec takes it; else its bytes go as they are.

        Returns:
            False if no tier has room: the bytes stay, and are counted as kept.
        """
        layout, nbytes = moved.layout, moved.nbytes
        if not (layout.is_dense and layout.nbytes == nbytes):
            start, end = range_to_move(moved.source, nbytes)
            if end - start != nbytes:
                moved.start = moved.decoded_start = start
                moved.nbytes = moved.device_bytes = end - start
                moved.is_whole = False
            if moved.is_whole or not layout.is_dense:
                moved.payload = (moved.source,)
                moved.home = current_stream(layout.blank.device)
                moved.late_codec = codec
                return True
        if self._queue(moved, codec):
            return True
        moved.meter.kept_bytes[HOST_FULL] += nbytes
        return False

    def settle(self, moved: MovedBytes) -> None:
        """Queue the copy of *moved* if it was put off; without room in any tier, it stays."""
        codec = moved.late_codec
        if codec is None:
            return
        moved.late_codec = None
        with nullcontext() if moved.home is None else moved.home:
            if not self._queue(moved, codec):
                moved.meter.kept_bytes[HOST_FULL] += moved.nbytes

    def copy_again(self, moved: MovedBytes, tensor: torch.Tensor) -> bool:
        """Copy the bytes of *moved* anew; say whether that was done: in host memory alone.

        Where copies are queued, the link would carry the bytes twice.

        Args:
            moved: may have come back.
            tensor: on the same storage, which may hold other bytes by now.
        """
        host, start = moved.host, moved.start
        is_done = type(moved.offload_ticket) is DoneTicket and moved.codec is None
        if not is_done or host is None or not moved.tier.store.is_host_memory:
            return False
        if type(tensor) is not torch.Tensor or not has_bytes(tensor):
            return False
        self.drop_device_copy(moved)
        end = start + moved.nbytes
        host.data.copy_(bytes_view(tensor.untyped_storage(), tensor.device, start, end))
        return True

    def let_leave(self, moved: MovedBytes) -> bool:
        """Order compute behind the copy of *moved*, and let its source go; False without a copy."""
        self.link.drain(lambda other: other is moved)
        return moved.host is not None

    def _queue(self, moved: MovedBytes, codec: Codec) -> bool:
        """Queue the copy of *moved* to a tier; say whether one has room for it."""
        nbytes, encoded = moved.nbytes, None
        if codec.name != "identity":
            encoded = self._encode(moved, codec)
            if encoded is not None:
                places, nbytes = place_parts(encoded.payload)
        for tier, use in self._tiers:
            moved.tier = tier
            moved.transport = tier.transport
            moved.host = host = tier.store.acquire(nbytes, use)
            if host is not None:
                break
        else:
            return False
        source = moved.source
        if encoded is not None:
            moved.payload = encoded.payload  # before the source goes: an interrupt may come
            moved.codec, moved.spec, moved.parts = codec, encoded.spec, places
            moved.device_bytes = nbytes
            source.data = moved.layout.blank
            sources = [part.contiguous().view(-1).view(torch.uint8) for part in encoded.payload]
            copies = tuple(zip(sources, part_targets(host.data, places), strict=True))
        else:
            layout = moved.layout
            if layout.is_copied_as_it_is and layout.nbytes == nbytes and moved.is_whole:
                moved.host_view = target = host.view_like(layout)
            else:
                blank, whole = layout.blank_bytes, source.untyped_storage()
                source = view_of_storage(blank, whole, moved.start, (nbytes,), (1,))
                target = host.data
            moved.payload = (source,)
            copies = ((source, target),)
        offload, label = moved.transport.offload, moved.label
        if self.is_watched and is_profiling():
            offload = in_range(offload, "offload", label.layer)
        for source, target in copies:
            ticket = offload(
                source, target, after=tier.store.barriers, label=label, times=self.times
            )
            if self.observer is not None:
                self.observer.on_copy("offload", label, target.nbytes, ticket)
        moved.offload_ticket = ticket
        moved.home = ticket.compute
        meter = moved.meter
        meter.offloaded_bytes += moved.nbytes
        meter.link_bytes += nbytes
        self.link.add(moved)
        return True

    def _encode(self, moved: MovedBytes, codec: Codec) -> Encoded | None:
        """Return the bytes as *codec* writes them; None if they must stay as they are."""
        source, end = moved.source, moved.start + moved.nbytes
        rows = rows_view(source, source.untyped_storage(), moved.start, end)
        if rows is None or not codec.accepts(source) or not codec.accepts(rows):
            return None
        if self.observer is None:
            return codec.encode(rows)
        return self.observer.around("encode", moved.label, lambda: codec.encode(rows))

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
        if moved.decoded is None:
            self._decode(moved, moved.codec, moved.payload)
        assert moved.decoded is not None
        return moved.decoded, moved.decoded_start

    def device_storage(self, moved: MovedBytes) -> torch.UntypedStorage:
        """Return the bytes on the device, decoding them first if need be.

        Decoding waits until the bytes are consumed, so that what was brought back ahead takes only
        its encoded size (PyAO paper, section 4.3).
        """
        if moved.decoded is None:
            buffer = moved.buffer
            assert buffer is not None
            if moved.codec is None:
                moved.decoded = buffer.untyped_storage()
            else:
                self._decode(moved, moved.codec, parts_view(buffer, moved.parts))
            moved.buffer = None
        assert moved.decoded is not None
        return moved.decoded

    def forget_decoded(self, moved: MovedBytes) -> None:
        """Let go of what :meth:`read_payload` decoded; the payload is there yet."""
        moved.decoded = None

    def _decode(self, moved: MovedBytes, codec: Codec, payload: tuple[torch.Tensor, ...]) -> None:
        if self.observer is None:
            tensor = codec.decode(payload, moved.spec)
        else:
            tensor = self.observer.around(
                "decode", moved.label, lambda: codec.decode(payload, moved.spec)
            )
        moved.decoded_start = moved.start - byte_offset(tensor)
        moved.decoded = tensor.untyped_storage()

    def start_backward(self, own: Group, others: Iterator[Group]) -> None:
        """Bring back what backward asks for, ahead of it; see [Note: Window] in ``transport``.

        Args:
            own: what the layer call moved whose backward begins, in the order in which backward
                asks for it.
            others: the same of the calls that follow.
        """
        self._coming.clear()
        self.start(
            self._items(own, (AWAY, OFFLOADING, RELOADING)),
            (self._items(each, (AWAY, OFFLOADING)) for each in others),
        )

    def _items(self, group: Group, phases: tuple[Phase, ...]) -> list[int]:
        """Return the ids of what in *group* is in one of *phases*, and note it as coming.

        Each layer's backward looks again at the groups behind it, as far as the window reaches:
        what was brought back already is not listed again.
        """
        items = []
        for ref in group:
            moved = ref()
            if moved is not None and moved.phase in phases:
                self._coming[moved.item] = ref
                items.append(moved.item)
        return items

    def is_away(self, item: int) -> bool:
        """Say whether the device has no copy of *item*, which can still be asked for."""
        moved = self._coming[item]()
        return moved is not None and moved.phase is AWAY

    def bring_back(self, item: int) -> None:
        """Queue the copy of *item* to the device, ahead of its use."""
        moved = self._coming[item]()
        assert moved is not None
        self.reload(moved)

    def await_reload(self, item: int) -> None:
        """Order compute behind the copy of *item* to the device, if one is under way."""
        moved = self._coming[item]()
        if moved is not None:
            self.wait(moved)

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
        reload = moved.transport.reload
        if self.is_watched and is_profiling():
            reload = in_range(reload, "reload", moved.label.layer)
        if moved.phase is not AWAY:
            moved.to(RELOADING)
        moved.reload_ticket = None
        moved.buffer = buffer
        moved.phase = RELOADING
        moved.reload_ticket = ticket = reload(
            source, buffer, after=(moved.offload_ticket,), label=moved.label, times=self.times
        )
        self.note_reload(moved.item, moved.device_bytes)
        meter = moved.meter
        meter.reloaded_bytes += moved.nbytes
        meter.link_bytes += moved.device_bytes
        if self.observer is not None:
            self.observer.on_copy("reload", moved.label, moved.device_bytes, ticket)

    def bring_here(self, moved: MovedBytes) -> None:
        """Let compute read *moved* on the device from here on, wherever its bytes are.

        To be called on its home.

        Raises:
            ReleasedTensorError: the buffers were given back.
        """
        if moved.phase is RELOADING and moved.reload_ticket is None:
            self.drop_device_copy(moved)  # its reload has failed
        if moved.phase is not RELOADING:
            self._queue_reload(moved)
        moved.transport.wait(moved.reload_ticket)  # as :meth:`wait` does
        moved.phase = HERE

    def wait(self, moved: MovedBytes) -> None:
        """Order the home of *moved* behind its reload, if one is under way."""
        if moved.phase is RELOADING and moved.reload_ticket is not None:
            moved.transport.wait(moved.reload_ticket)
            moved.phase = HERE

    def drop_device_copy(self, moved: MovedBytes) -> None:
        """Let go of the reloaded copy; the tier still has the bytes."""
        if moved.phase is RELOADING:
            _retire(moved, moved.reload_ticket)
        elif moved.phase is not HERE:
            return
        self.note_use(moved.item)
        moved.buffer = moved.decoded = None
        moved.phase = AWAY

    # ---- the end -------------------------------------------------------------------------------

    def release(self, moved: MovedBytes) -> None:
        """Give back the buffers of what no one can ask for any more.

        Runs in a destructor: on any thread and inside any other call, so it takes no lock.
        """
        phase, host = moved.phase, moved.host
        # The newest copy that uses the host buffer stands for the one before.
        last = moved.offload_ticket if moved.reload_ticket is None else moved.reload_ticket
        if phase is OFFLOADING:
            self.link.end(moved.item)
            if host is not None and last is None:
                _retire(moved, last)
        elif phase is RELOADING:
            _retire(moved, moved.reload_ticket)
            self.note_use(moved.item)
        moved.phase = RELEASED
        moved.buffer = moved.decoded = moved.host = None
        moved.payload = ()
        if host is not None:
            moved.tier.store.release(host, last)

    def collect_times(self, meter: MicroBatchStats, times: LinkTimes) -> None:
        """Move *times* into *meter*, with those of copies that are known by now to be done."""
        for transport in self.link.tiers.transports:
            transport.collect(meter, times)

    def collect(self, meter: MicroBatchStats) -> LinkTimes:
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


def _retire(moved: MovedBytes, ticket: Any) -> None:
    """Order what reuses the memory of a copy behind it; behind all copies if its ticket is lost."""
    if ticket is None:
        moved.transport.retire_all()
    else:
        moved.transport.retire(ticket)
