"""What autograd holds in place of a saved tensor.

Ownership runs one way: graph node → handle (:class:`SavedTensor`) → :class:`SavedStorage` →
buffers. The engine itself holds weak references only, so a buffer lives exactly as long as some
node may still ask for it, whatever becomes of the graph.
"""

from __future__ import annotations

import enum
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_pyao.codecs import Codec
from hf_pyao.errors import SavedTensorModifiedError
from hf_pyao.runtime.layout import PartPlace, byte_offset, byte_span, parts_view
from hf_pyao.stores import HostBuffer

if TYPE_CHECKING:
    from hf_pyao.runtime.recompute import RecomputedStorage
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


_LEGAL = (
    (Residency.HOST, Residency.RELEASED),
    (Residency.RELOADING, Residency.RELEASED),
    (Residency.DEVICE, Residency.HOST, Residency.RELEASED),
    (Residency.HOST, Residency.RELEASED),
    (),
)
"""Where each residency may lead to, in the order of the enum."""


class VersionWatch:
    """Sees in-place changes of a tensor without keeping its memory alive.

    Saved-tensor hooks switch off autograd's own check, which is restored with this. A detached
    tensor shares its origin's version counter; given empty data it keeps the counter and lets go
    of the storage.
    """

    __slots__ = ("_counter", "_version")

    def __init__(self, tensor: torch.Tensor, empty: torch.Tensor) -> None:
        self._counter = tensor.detach()
        self._version = tensor._version
        self._counter.data = empty

    @property
    def is_modified(self) -> bool:
        """True once the tensor was changed in place."""
        return self._counter._version != self._version


class SavedStorage:
    """One distinct storage (or byte range of one) that a layer call saved and that was offloaded.

    ``start`` is the byte offset of the range inside the original storage, a multiple of 64, so
    that rebuilt views keep their alignment: on a CPU alignment alone changes matrix products.
    """

    __slots__ = (
        "__weakref__",
        "buffer",
        "call",
        "codec",
        "decoded",
        "decoded_start",
        "device",
        "device_bytes",
        "end",
        "host",
        "impl",
        "is_consumed",
        "is_whole",
        "nbytes",
        "offload_ticket",
        "on_release",
        "ordinal",
        "parts",
        "path",
        "payload",
        "reload_ticket",
        "residency",
        "spec",
        "start",
        "version",
        "watches",
    )

    def __init__(
        self,
        call: LayerCall,
        path: str,
        ordinal: int,
        start: int,
        end: int,
        tensor: torch.Tensor,
        host: HostBuffer,
        on_release: Callable[[SavedStorage], None],
    ) -> None:
        self.call = call
        self.path = path
        self.ordinal = ordinal
        self.start = start
        self.end = end
        self.nbytes = end - start
        self.is_whole = start == 0 and end == tensor.untyped_storage().nbytes()
        self.version = tensor._version
        self.device = tensor.device
        self.host: HostBuffer | None = host
        self.on_release = on_release
        self.impl = tensor._cdata
        """Address of the tensor object that was saved first: it shares its version counter."""
        self.watches: list[VersionWatch] = []
        self.codec: Codec | None = None
        """None where the bytes were moved as they are."""
        self.spec: Any = None
        self.parts: tuple[PartPlace, ...] = ()
        self.payload: tuple[torch.Tensor, ...] = ()
        """What is being copied to the host; empty once compute is ordered behind the copy."""
        self.buffer: torch.Tensor | None = None
        """Reloaded payload: uint8, flat, on the device."""
        self.decoded: torch.UntypedStorage | None = None
        """Bytes ``start`` to ``end`` of the original storage, on the device."""
        self.decoded_start = start
        """Byte of the original storage that ``decoded`` begins with."""
        self.device_bytes = 0
        self.offload_ticket: Any = None
        self.reload_ticket: Any = None
        self.is_consumed = False
        self.residency = Residency.OFFLOADING

    def to(self, residency: Residency) -> None:
        """Go over to *residency*; only the transitions of the life of a buffer are legal."""
        if residency not in _LEGAL[self.residency]:
            raise AssertionError(
                f"{self.label}: illegal transition {self.residency.name} -> {residency.name}"
            )
        self.residency = residency

    @property
    def label(self) -> SlotLabel:
        """Layer and slot, for messages."""
        return SlotLabel(self.call.layer.fqn, self.path, self.ordinal)

    def covers(self, tensor: torch.Tensor, version: int) -> bool:
        """Say whether the bytes of *tensor*, on the same storage, are in here at *version*."""
        if self.version != version:
            return False
        if self.is_whole:
            return True
        start, end = byte_span(tensor)
        return self.start <= start and end <= self.end

    def check_unmodified(self) -> None:
        """Raise if a tensor on this storage was changed in place after it was saved."""
        for watch in self.watches:
            if watch.is_modified:
                raise modified_error(self.call.fqn, slot_name(self.path, self.ordinal))

    def device_storage(self) -> torch.UntypedStorage:
        """Return the bytes on the device, decoding them first if need be.

        Decoding waits until the bytes are consumed, so that what was brought back ahead takes only
        its encoded size (PyAO paper, section 4.3).
        """
        if self.decoded is None:
            assert self.buffer is not None
            if self.codec is None:
                self.decoded = self.buffer.untyped_storage()
            else:
                payload = parts_view(self.buffer, self.parts)
                decoded = self.codec.decode(payload, self.spec)
                self.decoded = decoded.untyped_storage()
                self.decoded_start = self.start - byte_offset(decoded)
            self.buffer = None
        return self.decoded

    def drop_device_copy(self) -> None:
        """Forget the device copy; the host still has the bytes."""
        self.buffer = None
        self.decoded = None

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Give the buffers back once no graph node can ask for them any more."""
        if self.residency is not Residency.RELEASED and not _is_finalizing():
            self.on_release(self)


class SavedTensor:
    """Handle for one saved tensor whose storage left the device: which view to rebuild."""

    __slots__ = ("call", "dtype", "offset", "size", "storage", "stride")

    def __init__(
        self, storage: SavedStorage | RecomputedStorage, tensor: torch.Tensor, call: LayerCall
    ) -> None:
        self.storage = storage
        self.call = call
        """Who saved it: not always who saved its storage first, which is ``storage.call``."""
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()

    def view_of(self, storage: torch.UntypedStorage, start: int) -> torch.Tensor:
        """Rebuild the tensor over *storage*, whose first byte is byte *start* of the original."""
        empty = torch.empty(0, dtype=self.dtype, device=self.storage.device)
        offset = self.offset - start // self.dtype.itemsize
        return empty.set_(storage, offset, self.size, self.stride)


class KeptTensor:
    """Handle for one saved tensor that stayed on the device."""

    __slots__ = ("call", "ordinal", "path", "tensor", "version")

    def __init__(
        self, tensor: torch.Tensor, version: int, call: LayerCall, path: str, ordinal: int
    ) -> None:
        self.tensor = tensor
        self.version = version
        self.call = call
        self.path = path
        self.ordinal = ordinal

    def check_unmodified(self) -> None:
        """Raise if the tensor was changed in place after it was saved."""
        if self.tensor._version != self.version:
            raise modified_error(self.call.fqn, slot_name(self.path, self.ordinal))


class SlotLabel(NamedTuple):
    """Names a slot of a layer; put into words only where a message needs it."""

    layer: str
    path: str
    ordinal: int

    def __str__(self) -> str:
        """Return ``model.layers.0 self_attn.q_proj:0``."""
        return f"{self.layer} {slot_name(self.path, self.ordinal)}"


StorageRef = weakref.ReferenceType[SavedStorage]


def slot_name(path: str, ordinal: int) -> str:
    """Name a slot: the sub-module that saved it first, and its ordinal there."""
    return f"{path}:{ordinal}"


def modified_error(layer: str, slot: str) -> SavedTensorModifiedError:
    """Build the error that autograd's version check would have raised without hooks."""
    return SavedTensorModifiedError(
        f"one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: the tensor saved as slot {slot!r} of layer {layer!r} was changed after it was "
        "saved, before backward used it. Use the out-of-place form of the operation, or clone the "
        "tensor before changing it. (It fails in the same way without hf_pyao.)"
    )
