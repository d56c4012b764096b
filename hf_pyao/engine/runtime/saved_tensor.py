"""What autograd holds in place of a saved tensor, and how in-place changes of it are seen.

Ownership runs one way: graph node → handle (:class:`SavedTensor`, :class:`KeptTensor`) → record
(:class:`SavedStorage`, which is :class:`~hf_pyao.engine.transfer.mover.MovedBytes`) → buffers. The
engine itself holds weak references only, so a buffer lives exactly as long as some node may still
ask for it, even if the graph is never run backward.

[Note: In-place changes]
Hooks switch off autograd's version check. A kept tensor is compared with its version at unpack. For
one whose device memory was let go, a detached tensor without data goes on sharing the version
counter, so that a change at any time before unpack raises as it would without hooks, and does not
depend on how far a copy had come. What backward itself got is watched too: one node may change it
before another asks for it. Whatever is watched is a pair (:data:`Watch`), and
:func:`has_changed` is the one answer to whether it was changed since.

[Note: Regions of a storage]
Several saved tensors may be regions of one storage, which is moved once. But regions may be filled
one after the other without a version telling: ``unsafe_chunk`` and recurrent cells give each chunk
a counter of its own, kernels fill a slice of a workspace and autograd never hears of it. So a copy
stands only for bytes that were saved themselves when it was made. Where the first tensor saved
is a part of its storage with gaps, the copy is put off to the end of the layer, and stands for all
regions that were saved until then: autograd would read the memory later still.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias, final

import torch

from hf_pyao.engine.runtime.flattened_tensor import Flattening, Watch, emptied
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.engine.runtime.streamed_weights import StreamedTensor
from hf_pyao.engine.runtime.tape import LayerCall
from hf_pyao.engine.transfer.layout import TensorLayout, byte_span
from hf_pyao.engine.transfer.mover import HERE, RELOADING, MovedBytes, Mover
from hf_pyao.errors import SavedTensorModifiedError

if TYPE_CHECKING:
    from hf_pyao.engine.recompute.replay import DroppedStorage

Record: TypeAlias = "SavedStorage | DroppedStorage"
"""What stands for a storage that left the device, or was dropped."""


def has_changed(watches: Iterable[Watch]) -> bool:
    """Say whether anything that is watched was changed in place since."""
    for counter, version in watches:
        if counter._version != version:
            return True
    return False


def modified_error(slot: Slot) -> SavedTensorModifiedError:
    """Build the error that autograd's version check would have raised without hooks."""
    return SavedTensorModifiedError(
        f"one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: the tensor saved as slot {slot.name!r} of layer {slot.layer!r} was changed "
        "after it was saved, before backward used it. Use the out-of-place form of the operation, "
        "or clone the tensor before changing it. (It fails in the same way without hf_pyao.)",
        key="changed-in-place",
    )


class WatchedStorage:
    """What stands for a saved storage whose device memory is let go: a record.

    In-place changes raise when it is asked for: see [Note: In-place changes].
    """

    home: torch.Stream | None = None
    """The compute stream that its memory belongs to; None on a CPU. See [Note: Stream order]."""
    _others: list[Watch] | None = None
    """Other tensors on the storage, which do not share the counter of the first."""
    handed_out: dict[TensorLayout, Watch] | None = None
    """Tensors that backward got, over one rebuilt storage, by their layout in the original one."""

    def __init__(
        self,
        call: LayerCall,
        slot: Slot,
        nbytes: int,
        tensor: torch.Tensor,
        layout: TensorLayout,
        source: torch.Tensor,
    ) -> None:
        """Watch *tensor*.

        Args:
            call: the layer call that saves it.
            slot: its slot there.
            nbytes: bytes that this stands for.
            tensor: what autograd saves.
            layout: that of *tensor*.
            source: *tensor*, detached; it shares the version counter, also once it is emptied.
        """
        self.call = call
        self.slot = slot
        self.nbytes = nbytes
        self.layout = layout
        """Of the tensor that was saved first."""
        self.version = tensor._version
        base = tensor._base
        self._counter_owner = weakref.ref(tensor if base is None else base)
        """A tensor that has the version counter that is watched. An address would not do: once the
        tensor is gone, another one gets it."""
        self.source = source

    @property
    def device(self) -> torch.device:
        """Where the storage was."""
        return self.layout.blank.device

    def covers(self, tensor: torch.Tensor, shares_counter: bool) -> bool:
        """Say whether this may stand for *tensor*, on the same storage and of the same version.

        Its bytes are to be among those of the tensor that was saved first: see [Note: Regions of a
        storage].

        Args:
            tensor: what autograd saves now.
            shares_counter: whether it is known to share the version counter that is watched.
        """
        layout = self.layout
        if self.version and not shares_counter:
            return False
        if layout.is_of(tensor):
            return True
        if not layout.is_dense:
            return False
        start = layout.offset * layout.blank.itemsize
        first, last = byte_span(tensor)
        return start <= first and last <= start + layout.nbytes

    def shares_counter_with(self, tensor: torch.Tensor) -> bool:
        """Say whether *tensor* is known to share the version counter of the first saved tensor.

        Views share their base's counter; those that ``detach`` made do too, and do not tell.
        """
        base = tensor._base
        return (tensor if base is None else base) is self._counter_owner()

    def hand_out(self, tensor: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
        """Record *tensor*, which goes to backward and lies as *layout*, and return it.

        Autograd would raise if one node changed it in place and another asked for it later.
        """
        if self.handed_out is None:
            self.handed_out = {}
        self.handed_out[layout] = tensor, tensor._version
        return tensor

    def handed_out_as(self, layout: TensorLayout) -> torch.Tensor | None:
        """Return the tensor that backward got already for *layout*, if it got one.

        It shares the version counter of the one before, so that there is one to look at however
        many nodes saved the tensor.
        """
        if self.handed_out is None or layout not in self.handed_out:
            return None
        return self.handed_out[layout][0].detach()

    def forget_handed_out(self) -> None:
        """Let go of what backward got; if it was changed meanwhile, that is remembered."""
        if self.handed_out is not None:
            if has_changed(self.handed_out.values()):
                self.version = -1
            self.handed_out = None

    def stand_for(self, layout: TensorLayout) -> None:
        """Stand for another view of the storage from now on."""

    def renew(self, tensor: torch.Tensor) -> None:
        """Stand for the bytes that *tensor*, on the same storage, has now, if that is possible.

        They may have changed through ``data``, of which no version tells.
        """

    def watch(self, tensor: torch.Tensor, layout: TensorLayout) -> None:
        """Watch *tensor* too, without keeping its memory alive.

        A detached tensor shares its origin's version counter; given empty data it keeps the counter
        and lets go of the storage.
        """
        counter = tensor.detach()
        others = self._others or []
        others.append((counter, tensor._version))
        counter.data = layout.blank
        self._others = others

    def check_unmodified(self) -> None:
        """Raise if a tensor on this storage was changed in place after it was saved."""
        if (
            self.source._version != self.version
            or (self._others is not None and has_changed(self._others))
            or (self.handed_out is not None and has_changed(self.handed_out.values()))
        ):
            raise modified_error(self.slot)


@final
class SavedStorage(WatchedStorage, MovedBytes):
    """One distinct storage (or byte range of one) that a layer call saved and that is moved."""

    _regions: list[TensorLayout] | None = None
    """Where the copy was put off: layouts of other tensors that were saved until then."""
    _is_safe = False
    """True once its bytes were away before an operation changed the tensor, which a replay reads as
    it was."""

    def __init__(
        self, mover: Mover, call: LayerCall, slot: Slot, tensor: torch.Tensor, layout: TensorLayout
    ) -> None:
        """Stand for the storage of *tensor*, which *mover* is to move."""
        # What the base classes do, written out: these are made in the hottest path there is.
        self.item = next(mover.link.new_items)
        self.call = call
        self.slot = self.label = slot
        self.meter = call.stats
        self.nbytes = self.device_bytes = slot.nbytes
        self.layout = layout
        self.source = tensor.detach()
        self.version = tensor._version
        base = tensor._base
        self._counter_owner = weakref.ref(tensor if base is None else base)
        self.mover = mover  # last, as in `MovedBytes`

    @property
    def is_whole_copy(self) -> bool:
        """Whether the copy was queued, and all of the storage is in it."""
        return self.is_whole and self.late_codec is None

    def covers(self, tensor: torch.Tensor, shares_counter: bool) -> bool:
        """Say whether this may stand for *tensor*, on the same storage and of the same version."""
        if self.late_codec is not None:
            start, end = (0, 0) if self.is_whole else byte_span(tensor)
            return self.is_whole or (self.start <= start and end <= self.start + self.nbytes)
        for layout in self._regions or ():
            if layout.is_of(tensor):
                return shares_counter or not self.version
        return super().covers(tensor, shares_counter)

    def stand_for(self, layout: TensorLayout) -> None:
        """Stand for another view of the storage from now on."""
        if self.late_codec is not None:
            self._regions = [*(self._regions or ()), layout]

    def renew(self, tensor: torch.Tensor) -> None:
        """Do so on a CPU. All that saved its storage gets these bytes, as without hooks."""
        if self.mover.copy_again(self, tensor):
            self.forget_handed_out()

    def tensor_on_device(self, layout: TensorLayout) -> torch.Tensor:
        """View the bytes that were brought back as *layout*."""
        buffer = self.buffer
        if buffer is not None and layout is self.layout and self.host_view is not None:
            self.decoded = buffer.untyped_storage()  # it came back as it is
            self.buffer = None
            return buffer
        return layout.view_of(self.mover.device_storage(self), self.decoded_start)

    def read(self) -> tuple[torch.UntypedStorage, int]:
        """Return its bytes on the device, and which byte of the original storage is the first.

        Raises:
            SavedTensorModifiedError: it was changed in place since it was saved, or backward has
                changed what it got.
        """
        if not self._is_safe:
            self.check_unmodified()
        elif self.handed_out is not None and has_changed(self.handed_out.values()):
            raise modified_error(self.slot)
        return self.mover.read(self)

    def survives_a_change(self) -> bool:
        """Copy its bytes away before compute changes the memory; False if the host has no room.

        Other regions of it may be changed by right while the copy is on its way.
        """
        self.mover.settle(self)
        self._is_safe = self.mover.let_leave(self)
        return self._is_safe

    def drop_device_copy(self) -> None:
        """Let go of what was brought back; the host still has the bytes."""
        if self.phase is HERE or self.phase is RELOADING:
            self.forget_handed_out()
            self.mover.drop_device_copy(self)


class _Handle:
    """What autograd holds for one saved tensor."""

    __slots__ = ("call",)

    call: LayerCall
    """Who saved it: not always who saved its storage first."""

    def belong_to(self, call: LayerCall) -> None:
        """Be asked for by the backward of *call*, whoever saved it."""
        self.call = call


@final
class SavedTensor(_Handle):
    """Handle for one saved tensor whose storage left the device: which view to rebuild."""

    __slots__ = ("layout", "storage")

    def __init__(self, storage: Record, layout: TensorLayout, call: LayerCall) -> None:
        self.storage = storage
        self.layout = layout
        self.call = call


@final
class KeptTensor(_Handle):
    """Handle for one saved tensor that stayed on the device."""

    __slots__ = ("slot", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, version: int, call: LayerCall, slot: Slot) -> None:
        self.tensor = tensor
        self.version = version
        self.call = call
        self.slot = slot

    def check_unmodified(self) -> None:
        """Raise if the tensor was changed in place after it was saved."""
        if self.tensor._version != self.version:
            raise modified_error(self.slot)

    def survives_a_change(self) -> bool:
        """Return False: what is read is the tensor itself."""
        return False

    def read(self) -> tuple[torch.UntypedStorage, int]:
        """Return its storage, as :meth:`SavedStorage.read` does."""
        self.check_unmodified()
        return self.tensor.untyped_storage(), 0


@final
class FlattenedTensor(_Handle):
    """Handle for one saved tensor whose inner tensors have handles of their own."""

    __slots__ = ("_flattening", "_handles", "_watches", "slot")

    def __init__(
        self, flattening: Flattening, handles: Mapping[str, Handle], call: LayerCall, slot: Slot
    ) -> None:
        self._flattening = flattening
        self._handles = dict(handles)
        self._watches = [flattening.watch]
        self.call = call
        self.slot = slot
        """Names it in errors; it has no bytes of its own."""

    def belong_to(self, call: LayerCall) -> None:
        """Be asked for by the backward of *call*, whoever saved it."""
        super().belong_to(call)
        for handle in self._handles.values():
            handle.belong_to(call)

    def give(self, unpack: Callable[[Handle], torch.Tensor]) -> torch.Tensor:
        """Return the tensor, over inner tensors that *unpack* gives; see that it is unchanged."""
        if has_changed(self._watches):
            raise modified_error(self.slot)
        inner = {name: unpack(handle) for name, handle in self._handles.items()}
        made = self._flattening.tensor_over(inner)
        self._watches[1:] = [emptied(made, inner)]
        return made


Handle: TypeAlias = KeptTensor | SavedTensor | StreamedTensor | FlattenedTensor
"""What autograd holds."""


def whole_source(handle: Handle) -> KeptTensor | SavedStorage | None:
    """Return what reads all of a storage for *handle*, without replaying anything; else None."""
    if not isinstance(handle, SavedTensor):
        return handle if isinstance(handle, KeptTensor) else None
    record = handle.storage
    return record if isinstance(record, SavedStorage) and record.is_whole else None
