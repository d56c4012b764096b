"""Slots: memory on the device that holds one block each, and the uploads into it.

[Note: Slots]
- An upload starts behind all that compute has queued so far, hence behind the readers of the block
  that the slot held. Compute waits for the upload before it reads the slot. The host waits for
  nothing, and nothing is copied back.
- Weights are read as views of the slot. Before a slot is used again, :meth:`DeviceSlots.upload`
  checks whether anyone still holds one. Then that memory is left to its holder, with the bytes that
  it had, and the slot gets other memory: :attr:`UploadFigures.num_left` counts it.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Iterator, Sequence

import torch

from hf_pyao.engine.transfer.compute_streams import (
    current_stream,
    is_held_elsewhere,
    visitor_of,
)
from hf_pyao.engine.transfer.layout import bytes_view
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.transport import LinkTimes, Transport
from hf_pyao.engine.weights.blocks import Block
from hf_pyao.engine.weights.figures import UploadFigures

logger = logging.getLogger(__name__)


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
        self.is_here = False
        """True once compute is ordered behind the upload."""

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


class DeviceSlots:
    """Slots of one size, and the uploads into them.

    Args:
        blocks: what is uploaded; kept until the last upload has ended, even if the ring is gone.
        num_slots: how many slots there are.
        link: has the transport.
        device: where the slots are.
        counts: the meter of the uploads.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        num_slots: int,
        link: LinkContext,
        device: torch.device,
        counts: UploadFigures,
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
        end = weakref.finalize(self, _retire, self._transport, self._slots, self._blocks)
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
        meant.note_content()
        slot.await_visitors()
        for start, bytes_on_host in meant.pieces():
            self._copy(slot, meant.layer, after, start, bytes_on_host)

    def _at_home(self, slot: DeviceSlot) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if slot.home is None else slot.home

    def _copy(
        self,
        slot: DeviceSlot,
        layer: str,
        after: Sequence[object],
        start: int,
        bytes_on_host: torch.Tensor,
    ) -> None:
        """Queue the copy of bytes to byte *start* of *slot* on.

        Args:
            slot: where to.
            layer: whose weights they are.
            after: as for :meth:`upload`.
            start: first byte in the slot.
            bytes_on_host: what is copied.
        """
        assert slot.storage is not None
        end = start + bytes_on_host.numel()
        target = bytes_view(slot.storage, self._device, start, end)
        try:
            with self._at_home(slot):
                ticket: object = self._transport.reload(
                    bytes_on_host,
                    target,
                    after=after,
                    label=f"weights of {layer!r}",
                    times=self.times,
                )
                slot.tickets.append(ticket)
        except BaseException:
            self._transport.retire_all()  # an interrupt: it may be queued, and no one knows
            raise
        self._counts.uploaded_bytes += bytes_on_host.numel()

    def await_upload(self, slot: DeviceSlot) -> None:
        """Order compute on the current stream behind the upload into *slot*."""
        for ticket in slot.tickets:
            self._transport.wait(ticket)
        slot.is_here = True

    def empty(self, slot: DeviceSlot) -> None:
        """Let go of an upload into *slot* that no one has waited for."""
        if not slot.is_here:
            for ticket in slot.tickets:
                self._transport.retire(ticket)
        slot.tickets.clear()
        slot.is_here = False

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
        self._transport.collect(self._counts, self.times)

    def _leave_to_holder(self, slot: DeviceSlot) -> None:
        storage, slot.storage = slot.storage, None
        assert storage is not None
        self._slot_of_storage.pop(storage._cdata, None)
        self._counts.num_left += 1
        self._counts.left_bytes += storage.nbytes()


def _retire(transport: Transport, slots: Sequence[DeviceSlot], blocks: Sequence[Block]) -> None:
    """Let uploads end before the memory goes that they read and write: the slots are gone.

    *blocks* keep the host's side until then.
    """
    for slot in slots:
        for ticket in slot.tickets:
            transport.retire(ticket)
            while not transport.is_done(ticket):
                time.sleep(1e-4)
