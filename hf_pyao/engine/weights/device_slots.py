"""Slots: memory on the device that holds one block each, and the uploads into it.

[Note: Slots]
- An upload starts behind all that compute has queued so far, hence behind the readers of the block
  that the slot held. Compute waits for the upload before it reads the slot. The host waits for
  nothing, and nothing is copied back.
- A block on a disk comes span by span, as :class:`~hf_pyao.engine.weights.read_ahead.ReadAhead` has
  read them. Its copies start behind what compute had queued when the slot was given to the block,
  however late they are queued; who waits for the upload first waits until they are.
- Weights are handed out as views of the slot, made anew for each upload. Before a slot is used
  again, :meth:`DeviceSlots.upload` checks whether anyone still holds a view (an autograd function
  that keeps it on ``ctx``, a reference of the user's). Then that memory is left to its holder, with
  the bytes that it had, and the slot gets other memory: :attr:`UploadFigures.num_left` counts it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hf_pyao.engine.transfer.compute_streams import (
    current_stream,
    is_held_elsewhere,
    visitor_of,
)
from hf_pyao.engine.transfer.layout import bytes_view, view_of_storage
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.transport import LinkTimes, Transport
from hf_pyao.engine.weights.blocks import Block, Weight
from hf_pyao.engine.weights.castable import Part
from hf_pyao.engine.weights.figures import UploadFigures
from hf_pyao.engine.weights.read_ahead import Arrival, ReadAhead
from hf_pyao.engine.weights.slot_view import SlotView, lost_write
from hf_pyao.errors import warn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A plain view of a part of a weight."""

    view: torch.Tensor
    first_version: int

    @property
    def was_written(self) -> bool:
        """Whether a layer has changed it, see [Note: Lost writes]."""
        return self.view._version != self.first_version


class DeviceSlot:
    """Memory on the device, and what is in it."""

    def __init__(self) -> None:
        self.storage: torch.UntypedStorage | None = None
        self.home: torch.Stream | None = None
        """The compute stream that the memory belongs to; None on a CPU."""
        self._visitors: set[torch.Stream] = set()
        """Other streams that read it."""
        self.tickets: list[object] = []
        """Of the copies of the upload."""
        self.arrival: Arrival | None = None
        """What is still to come from a disk; None once all copies are queued."""
        self.is_here = False
        """True once compute is ordered behind the upload."""
        self.views: dict[int, SlotView] = {}
        """Views that were handed out, by the weight's offset."""
        self.parts: dict[tuple[Weight, Part], HeldPart] = {}
        """Plain views that casts are made of, or that stand for casts."""
        self.content: int | None = None
        """The block whose bytes are in it, or on their way; also when it was forgotten since."""

    def let_go_of_views(self) -> None:
        """Forget the views that were handed out."""
        self.views.clear()
        self.parts.clear()

    def hand_out(self, view: SlotView) -> SlotView:
        """Note *view*, which a module gets; return it."""
        self.views[view.weight.offset] = view
        return view

    def written(self) -> str | None:
        """Return the name of a weight that a layer has written into; None if it has not."""
        names = [view.weight.name for view in self.views.values() if view.was_written]
        names += [weight.name for (weight, _), each in self.parts.items() if each.was_written]
        return names[0] if names else None

    def part(self, weight: Weight, part: Part, blank: torch.Tensor) -> torch.Tensor:
        """Return *part* of *weight*, which the slot holds, as a plain tensor of *blank*'s dtype."""
        known = self.parts.get((weight, part))
        if known is not None:
            return known.view
        assert self.storage is not None
        first = weight.offset // blank.itemsize + part.offset
        view = view_of_storage(blank, self.storage, first, part.size, part.stride)
        return self.keep(weight, part, view)

    def keep(self, weight: Weight, part: Part, view: torch.Tensor) -> torch.Tensor:
        """Keep *view* of *part* of *weight*, or return the one that is kept already."""
        return self.parts.setdefault((weight, part), HeldPart(view, view._version)).view

    def meet(self) -> None:
        """Let the current stream read the slot, if the memory belongs to another stream."""
        visitor = visitor_of(self.home)
        if visitor is not None and self.home is not None:
            visitor.wait_stream(self.home)
            self._visitors.add(visitor)

    def await_visitors(self) -> None:
        """Order the stream that the memory belongs to behind the others that read it."""
        while self._visitors:
            visitor = self._visitors.pop()
            if self.home is not None:
                self.home.wait_stream(visitor)

    @property
    def is_at_home(self) -> bool:
        """True if the memory belongs to the current stream."""
        return visitor_of(self.home) is None


class DeviceSlots:
    """Slots of one size, and the uploads into them.

    Args:
        blocks: what is uploaded; kept until the last upload has ended, even if the ring is gone.
        num_slots: how many slots there are.
        link: has the transport.
        device: where the slots are.
        counts: the meter of the uploads.
        read_ahead: reads blocks that are on a disk; None: none are.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        num_slots: int,
        link: LinkContext,
        device: torch.device,
        counts: UploadFigures,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        self.nbytes = max((block.nbytes for block in blocks), default=0)
        """Size of each slot."""
        self.times = LinkTimes()
        """What the uploads took, and compute's waits for them."""
        self._blocks = tuple(blocks)
        self._counts = counts
        self._device = device
        self._transport = link.transport
        self._slots = tuple(DeviceSlot() for _ in range(num_slots))
        self._slot_of_storage: dict[int, DeviceSlot] = {}
        self._has_told_of_holders = False
        self._read_ahead = read_ahead
        end = weakref.finalize(
            self, _retire, self._transport, self._slots, self._blocks, read_ahead
        )
        end.atexit = False

    def __getitem__(self, number: int) -> DeviceSlot:
        return self._slots[number]

    def __iter__(self) -> Iterator[DeviceSlot]:
        return iter(self._slots)

    def of_storage(self, key: int) -> DeviceSlot | None:
        """Return the slot whose memory is the storage at *key*."""
        return self._slot_of_storage.get(key)

    def upload(self, block: int, slot: DeviceSlot, *, after: Sequence[object] = ()) -> None:
        """Queue the copy of *block* into *slot*; see [Note: Slots].

        Args:
            block: which one.
            slot: where to.
            after: tickets of copies to the host, behind which the upload starts.
        """
        meant = self._blocks[block]
        self.empty(slot)
        if slot.storage is not None and is_held_elsewhere(slot.storage):
            self._leave_to_holder(slot)
        if slot.storage is None:
            slot.storage = torch.empty(
                self.nbytes, dtype=torch.uint8, device=self._device
            ).untyped_storage()
            slot.home = current_stream(self._device)
            self._slot_of_storage[slot.storage._cdata] = slot
        meant.follow_changes()
        in_file = meant.masters.file_to_read()
        meant.note_content()
        slot.content = block
        slot.await_visitors()
        if in_file is not None:
            assert self._read_ahead is not None
            with self._at_home(slot):
                mark = self._transport.mark(self._device)
            copy = functools.partial(self._copy, slot, meant.layer, (), mark)
            spans = meant.spans(self._read_ahead.piece_bytes)
            slot.arrival = self._read_ahead.begin(block, in_file, spans, copy)
            return
        for start, bytes_on_host in meant.pieces():
            self._copy(slot, meant.layer, after, None, start, bytes_on_host)

    def _at_home(self, slot: DeviceSlot) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if slot.home is None else slot.home

    def _copy(
        self,
        slot: DeviceSlot,
        layer: str,
        after: Sequence[object],
        behind: object,
        start: int,
        bytes_on_host: torch.Tensor,
    ) -> object:
        """Queue the copy of bytes to byte *start* of *slot* on; return its ticket.

        Args:
            slot: where to.
            layer: whose weights they are.
            after: as for :meth:`upload`.
            behind: where compute was when the slot was given to them; None: where it is now.
            start: first byte in the slot.
            bytes_on_host: what is copied.
        """
        assert slot.storage is not None
        end = start + bytes_on_host.numel()
        target = bytes_view(slot.storage, self._device, start, end)
        options = {} if behind is None else {"behind": behind}
        try:
            with self._at_home(slot):
                ticket: object = self._transport.reload(
                    bytes_on_host,
                    target,
                    after=after,
                    label=f"weights of {layer!r}",
                    times=self.times,
                    **options,
                )
                slot.tickets.append(ticket)
        except BaseException:
            self._transport.retire_all()  # an interrupt: it may be queued, and no one knows
            raise
        self._counts.uploaded_bytes += bytes_on_host.numel()
        return ticket

    def await_upload(self, slot: DeviceSlot) -> None:
        """Order compute on the current stream behind the upload into *slot*.

        Raises:
            DiskError: the block is on a disk, and cannot be read; nothing is left under way then.
        """
        if slot.arrival is not None:
            assert self._read_ahead is not None
            try:
                self._read_ahead.finish(slot.arrival)
            except Exception:
                self._read_ahead.cancel(slot.arrival)
                slot.arrival = None
                raise
            slot.arrival = None
        for ticket in slot.tickets:
            self._transport.wait(ticket)
        slot.is_here = True

    def empty(self, slot: DeviceSlot) -> None:
        """Let go of the views of what *slot* held, and of an upload that no one has waited for.

        Raises:
            ConflictError: a layer has written into it.
        """
        written = slot.written()
        slot.let_go_of_views()
        slot.content = None
        if slot.arrival is not None and self._read_ahead is not None:
            self._read_ahead.cancel(slot.arrival)
            slot.arrival = None
        if not slot.is_here:
            for ticket in slot.tickets:
                self._transport.retire(ticket)
        slot.tickets.clear()
        slot.is_here = False
        if written is not None:
            error = lost_write(written)
            if sys.exc_info()[0] is None:
                raise error
            warn(
                logger, "streamed-weight-changed", "%s", error, level=logging.ERROR
            )  # another error is being raised, and is reported

    def release(self) -> None:
        """Empty all slots, and let go of their memory."""
        for slot in self._slots:
            self.empty(slot)
            slot.await_visitors()
            if slot.storage is not None:
                self._slot_of_storage.pop(slot.storage._cdata, None)
            slot.storage = slot.home = None

    def collect(self) -> None:
        """Add the times of the uploads that have ended to the figures."""
        if self._read_ahead is not None:
            self._read_ahead.note_reads()
        self._transport.collect(self._counts, self.times)

    def _leave_to_holder(self, slot: DeviceSlot) -> None:
        storage, slot.storage = slot.storage, None
        assert storage is not None
        self._slot_of_storage.pop(storage._cdata, None)
        self._counts.num_left += 1
        self._counts.left_bytes += storage.nbytes()
        if not self._has_told_of_holders:
            self._has_told_of_holders = True
            warn(
                logger,
                "streamed-weight-held",
                "someone holds frozen weights longer than the layer runs, as an autograd function "
                "does that keeps them on `ctx`: these %.3f GiB stay on the device until they are "
                "let go.",
                storage.nbytes() / 2**30,
            )


def _retire(
    transport: Transport,
    slots: Sequence[DeviceSlot],
    blocks: Sequence[Block],
    read_ahead: ReadAhead | None,
) -> None:
    """Let uploads end before the memory goes that they read and write: the slots are gone.

    *blocks* and *read_ahead* keep the host's side until then.
    """
    if read_ahead is not None:
        read_ahead.release()
    for slot in slots:
        for ticket in slot.tickets:
            transport.retire(ticket)
            while not transport.is_done(ticket):
                time.sleep(1e-4)
