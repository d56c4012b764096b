"""What autograd holds in place of a saved tensor.

Ownership runs one way: graph node → handle (:class:`SavedTensor`) → :class:`SavedStorage` →
buffers. The engine itself holds weak references only, so a buffer lives exactly as long as some
node may still ask for it, whatever becomes of the graph.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch

from hf_pyao.codecs import Codec
from hf_pyao.runtime.layout import (
    PartPlace,
    TensorLayout,
    byte_offset,
    byte_span,
    parts_view,
)
from hf_pyao.runtime.watching import SlotLabel, WatchedStorage, modified_error
from hf_pyao.stores import HostBuffer

if TYPE_CHECKING:
    from hf_pyao.runtime.tape import LayerCall


class Residency(enum.IntEnum):
    """Where the bytes of a saved storage are."""

    OFFLOADING = 0
    """The copy to the host is queued; the device copy is held until compute is ordered behind."""
    HOST = 1
    """Only the host buffer holds them: no device memory."""
    RELOADING = 2
    """A device buffer is allocated and the copy into it queued."""
    DEVICE = 3
    """Compute is ordered behind the reload and may read the device buffer."""
    RELEASED = 4
    """Buffers are given back; asking for the bytes is an error."""


OFFLOADING, HOST, RELOADING, DEVICE, RELEASED = Residency
"""The same, for hot paths: to ask an enum for a member takes several times as long."""

_LEGAL = (
    (HOST, RELEASED),
    (RELOADING, RELEASED),
    (DEVICE, HOST, RELEASED),
    (HOST, RELEASED),
    (),
)
"""Where each residency may lead to, in the order of the enum."""


def _not_made_yet(record: SavedStorage) -> None:
    """Release nothing: an interrupt came as *record* was made."""


class SavedStorage(WatchedStorage):
    """One distinct storage (or byte range of one) that a layer call saved and that was offloaded.

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
    host_view: torch.Tensor | None = None
    """The host buffer with the layout of the saved tensor, where that was copied as it is; else
    None, and bytes are copied."""
    buffer: torch.Tensor | None = None
    """Reloaded payload, on the device: laid out as ``host_view``, or uint8 and flat."""
    decoded: torch.UntypedStorage | None = None
    """Bytes ``start`` to ``start + nbytes`` of the original storage, on the device."""
    host: HostBuffer | None = None
    offload_ticket: Any = None
    reload_ticket: Any = None
    start = 0
    is_whole = True
    """True if the whole storage is in here."""
    decoded_start = 0
    """Byte of the original storage that ``decoded`` begins with."""
    is_consumed = False
    residency: Residency = OFFLOADING
    on_release: Callable[[SavedStorage], None] = staticmethod(_not_made_yet)
    queue_copy: Callable[[SavedStorage], None] | None = None
    """While the copy to the host is put off: queues it. See [Note: Regions of a storage]."""
    _regions: list[TensorLayout] | None = None
    """Where the copy was put off: the layouts of all tensors that were saved until then."""

    def __init__(
        self,
        call: LayerCall,
        slot: SlotLabel,
        byte_range: tuple[int, int],
        storage_nbytes: int,
        tensor: torch.Tensor,
        layout: TensorLayout,
        on_release: Callable[[SavedStorage], None],
    ) -> None:
        self.on_release = on_release
        start, end = byte_range
        self.device_bytes = nbytes = end - start
        """Bytes that the payload takes on the device when it is brought back."""
        super().__init__(call, slot, nbytes, tensor, layout)
        if nbytes != storage_nbytes:
            self.start = self.decoded_start = start
            self.is_whole = False

    @property
    def source(self) -> torch.Tensor:
        """The saved tensor's memory, laid out as it is; without data once it was let go."""
        return self._counter

    def source_has_left(self) -> None:
        """Let go of the device copy: compute is ordered behind the copy to the host."""
        self.to(HOST)  # first: an interrupt may come, and the bytes are looked for where it says
        self.payload = ()
        self._counter.data = self.layout.blank  # as let_go_of_source does

    def to(self, residency: Residency) -> None:
        """Go over to *residency*; only the transitions of the life of a buffer are legal."""
        if residency not in _LEGAL[self.residency]:
            raise AssertionError(
                f"{self.slot}: illegal transition {self.residency.name} -> {residency.name}"
            )
        self.residency = residency

    def put_off(self, queue_copy: Callable[[SavedStorage], None]) -> None:
        """Copy to the host later, when :meth:`settle` is called."""
        self.payload = (self.source,)
        self.queue_copy = queue_copy
        self._regions = [self.layout]

    def settle(self) -> None:
        """Queue the copy to the host if it was put off."""
        queue_copy, self.queue_copy = self.queue_copy, None
        if queue_copy is not None:
            queue_copy(self)

    def covers(self, tensor: torch.Tensor, shares_counter: bool) -> bool:
        """Say whether this may stand for *tensor*, on the same storage and of the same version."""
        if self._regions is None:
            return super().covers(tensor, shares_counter)
        if self.queue_copy is None:
            is_saved = any(layout.is_of(tensor) for layout in self._regions)
            return is_saved and (shares_counter or not self.version)
        start, end = byte_span(tensor)
        return self.is_whole or (self.start <= start and end <= self.start + self.nbytes)

    def stand_for(self, layout: TensorLayout) -> None:
        """Take note that this stands for another view of the storage from now on."""
        if self.queue_copy is not None and self._regions is not None:
            self._regions.append(layout)

    def tensor_on_device(self, handle: SavedTensor) -> torch.Tensor:
        """Return what *handle* stands for, over the bytes that were brought back."""
        buffer = self.buffer
        if buffer is not None and self.host_view is not None:
            self.decoded = buffer.untyped_storage()
            self.buffer = None
            if handle.layout is self.layout:
                return buffer
        return handle.layout.view_of(self.device_storage(), self.decoded_start)

    def device_storage(self) -> torch.UntypedStorage:
        """Return the bytes on the device, decoding them first if need be.

        Decoding waits until the bytes are consumed, so that what was brought back ahead takes only
        its encoded size (PyAO paper, section 4.3).
        """
        decoded = self.decoded
        if decoded is None:
            buffer = self.buffer
            assert buffer is not None
            if self.codec is None:
                decoded = buffer.untyped_storage()
            else:
                tensor = self.codec.decode(parts_view(buffer, self.parts), self.spec)
                decoded = tensor.untyped_storage()
                self.decoded_start = self.start - byte_offset(tensor)
            self.decoded = decoded
            self.buffer = None
        return decoded

    def payload_storage(self) -> tuple[torch.UntypedStorage, int]:
        """Read the device copy, which has not been let go yet.

        Returns:
            A storage, and which byte of the original one is its first.
        """
        if self.codec is None:
            return self.payload[0].untyped_storage(), 0
        decoded = self.codec.decode(self.payload, self.spec)
        return decoded.untyped_storage(), self.start - byte_offset(decoded)

    def drop_device_copy(self) -> None:
        """Forget the device copy; the host still has the bytes."""
        self.forget_handed_out()
        self.buffer = None
        self.decoded = None

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Give the buffers back once no graph node can ask for them any more."""
        if self.residency is not RELEASED and not _is_finalizing():
            self.on_release(self)


class SavedTensor:
    """Handle for one saved tensor whose storage left the device: which view to rebuild."""

    __slots__ = ("call", "layout", "storage")

    def __init__(self, storage: WatchedStorage, layout: TensorLayout, call: LayerCall) -> None:
        self.storage = storage
        self.layout = layout
        self.call = call
        """Who saved it: not always who saved its storage first, which is ``storage.call``."""


@final
class KeptTensor:
    """Handle for one saved tensor that stayed on the device."""

    __slots__ = ("call", "slot", "tensor", "version")

    def __init__(
        self, tensor: torch.Tensor, version: int, call: LayerCall, slot: SlotLabel
    ) -> None:
        self.tensor = tensor
        self.version = version
        self.call = call
        self.slot = slot

    def check_unmodified(self) -> None:
        """Raise if the tensor was changed in place after it was saved."""
        if self.tensor._version != self.version:
            raise modified_error(self.slot)
