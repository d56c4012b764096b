"""What autograd holds in place of a saved tensor, and how in-place changes of it are seen.

Ownership runs one way: graph node → handle (:class:`SavedTensor`, :class:`KeptTensor`) → record
(:class:`SavedStorage`) → :class:`~hf_pyao.engine.transfer.moved_bytes.MovedBytes` → buffers. The
engine itself holds weak references only, so a buffer lives exactly as long as some node may still
ask for it, even if the graph is never run backward.

[Note: In-place changes]
Hooks switch off autograd's version check. A kept tensor is compared with its version at unpack. For
one whose device memory was let go, a detached tensor without data goes on sharing the version
counter, so that a change at any time before unpack raises as it would without hooks, and does not
depend on how far a copy had come. What backward itself got is watched too: one node may change it
before another asks for it.

[Note: Regions of a storage]
Several saved tensors may be regions of one storage, which is moved once. But regions may be filled
one after the other without a version telling: ``unsafe_chunk`` and recurrent cells give each chunk
a counter of its own, kernels fill a slice of a workspace and autograd never hears of it. So a copy
stands only for bytes that were saved themselves when it was made. Where the first tensor saved
is a part of its storage with gaps, the copy is put off to the end of the layer, and stands for all
regions that were saved until then: autograd would read the memory later still.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Mapping
from typing import TypeAlias, final

import torch

from hf_pyao.engine.runtime.flattened_tensor import EmptiedCounter, Flattening
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.engine.runtime.streamed_weights import StreamedTensor
from hf_pyao.engine.runtime.tape import LayerCall
from hf_pyao.engine.transfer.compute_streams import visitor_of
from hf_pyao.engine.transfer.layout import TensorLayout, byte_span
from hf_pyao.engine.transfer.moved_bytes import MovedBytes
from hf_pyao.engine.transfer.mover import Mover
from hf_pyao.errors import SavedTensorModifiedError


def modified_error(slot: Slot) -> SavedTensorModifiedError:
    """Build the error that autograd's version check would have raised without hooks."""
    return SavedTensorModifiedError(
        f"one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: the tensor saved as slot {slot.name!r} of layer {slot.layer!r} was changed "
        "after it was saved, before backward used it. Use the out-of-place form of the operation, "
        "or clone the tensor before changing it. (It fails in the same way without hf_pyao.)",
        key="changed-in-place",
    )


class VersionWatch:
    """Sees in-place changes of a tensor without keeping its memory alive.

    Saved-tensor hooks switch off autograd's own check, which is restored with this. A detached
    tensor shares its origin's version counter; given empty data it keeps the counter and lets go
    of the storage.
    """

    __slots__ = ("_counter", "_version")

    def __init__(self, tensor: torch.Tensor, blank: torch.Tensor) -> None:
        """Watch *tensor*; *blank* is an empty tensor of its dtype and device."""
        self._counter = counter = tensor.detach()
        self._version = tensor._version
        counter.data = blank

    @property
    def is_modified(self) -> bool:
        """True once the tensor was changed in place."""
        return self._counter._version != self._version


class WatchedStorage:
    """What stands for a saved storage whose device memory is let go: a record.

    In-place changes raise when it is asked for: see [Note: In-place changes].
    """

    home: torch.Stream | None = None
    """The compute stream that its memory belongs to; None on a CPU. See [Note: Stream order]."""
    _other_watches: list[VersionWatch] | None = None
    handed_out: list[tuple[torch.Tensor, int, TensorLayout]] | None = None
    """Tensors that backward got, over one rebuilt storage; their versions then; their layouts in
    the original storage."""

    def __init__(
        self,
        call: LayerCall,
        slot: Slot,
        nbytes: int,
        tensor: torch.Tensor,
        layout: TensorLayout,
        counter: torch.Tensor,
    ) -> None:
        """Watch *tensor*.

        Args:
            call: the layer call that saves it.
            slot: its slot there.
            nbytes: bytes that this stands for.
            tensor: what autograd saves.
            layout: that of *tensor*.
            counter: *tensor*, detached; it shares the version counter, also once it is emptied.
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
        self._counter = counter

    @property
    def device(self) -> torch.device:
        """Where the storage was."""
        return self.layout.blank.device

    def covers(self, tensor: torch.Tensor, shares_counter: bool) -> bool:
        """Say whether this may stand for *tensor*, on the same storage and of the same version.

        See [Note: Regions of a storage].

        Args:
            tensor: what autograd saves now.
            shares_counter: whether it is known to share the version counter that is watched.
        """
        return (shares_counter or not self.version) and self._saved(tensor)

    def _saved(self, tensor: torch.Tensor) -> bool:
        """Say whether the bytes of *tensor* are among those of the tensor that was saved first."""
        layout = self.layout
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

    def hand_out(self, tensor: torch.Tensor, handle: SavedTensor) -> torch.Tensor:
        """Record *tensor*, which goes to backward, and return it.

        Autograd would raise if one node changed it in place and another asked for it later.

        Args:
            tensor: over a storage that was brought back or rebuilt.
            handle: what it stands for.
        """
        note = (tensor, tensor._version, handle.layout)
        if self.handed_out is None:
            self.handed_out = [note]
        else:
            self.handed_out.append(note)
        return tensor

    def handed_out_like(self, handle: SavedTensor) -> torch.Tensor | None:
        """Return a tensor that backward got already, if it is just what *handle* stands for.

        It shares the version counter of the one before, so that there is one to look at however
        many nodes saved the tensor.
        """
        for tensor, _, layout in self.handed_out or ():
            if layout is handle.layout:
                return tensor.detach()
        return None

    def forget_handed_out(self) -> None:
        """Let go of what backward got; if it was changed meanwhile, that is remembered."""
        if self.handed_out is not None:
            if self._is_changed_by_backward():
                self.version = -1
            self.handed_out = None

    def _is_changed_by_backward(self) -> bool:
        for tensor, version, _ in self.handed_out or ():
            if tensor._version != version:
                return True
        return False

    def stand_for(self, layout: TensorLayout) -> None:
        """Stand for another view of the storage from now on."""

    def renew(self, tensor: torch.Tensor) -> None:
        """Stand for the bytes that *tensor*, on the same storage, has now, if that is possible.

        They may have changed through ``data``, of which no version tells.
        """

    def watch(self, tensor: torch.Tensor, layout: TensorLayout) -> None:
        """Watch *tensor* too."""
        if self._other_watches is None:
            self._other_watches = []
        self._other_watches.append(VersionWatch(tensor, layout.blank))

    def check_unmodified(self) -> None:
        """Raise if a tensor on this storage was changed in place after it was saved."""
        is_modified = self._counter._version != self.version
        if self._other_watches is not None:
            is_modified |= any(other.is_modified for other in self._other_watches)
        if self.handed_out is not None:
            is_modified |= self._is_changed_by_backward()
        if is_modified:
            raise modified_error(self.slot)


@final
class SavedStorage(WatchedStorage):
    """One distinct storage (or byte range of one) that a layer call saved and that was moved."""

    _regions: list[TensorLayout] | None = None
    """Where the copy was put off: the layouts of all tensors that were saved until then."""
    _is_safe = False
    """True once its bytes were away before an operation changed the tensor, which a replay reads as
    it was."""

    def __init__(
        self,
        call: LayerCall,
        slot: Slot,
        tensor: torch.Tensor,
        moved: MovedBytes,
        mover: Mover,
    ) -> None:
        """Stand for the storage of *tensor*, whose bytes are *moved* by *mover*."""
        # What the base class does, written out: these are made in the hottest path there is.
        self.moved = moved
        self._mover = mover
        self.call = call
        self.slot = slot
        self.nbytes = moved.nbytes
        self.layout = layout = moved.layout
        self.version = tensor._version
        base = tensor._base
        self._counter_owner = weakref.ref(tensor if base is None else base)
        self._counter = moved.source
        if moved.home is not None:
            self.home = moved.home
        if moved.late_codec is not None:
            self._regions = [layout]

    @property
    def is_whole_copy(self) -> bool:
        """Whether the copy was queued, and all of the storage is in it."""
        return self.moved.is_whole and not self.moved.is_put_off

    def is_equal_here(self, nbytes: int) -> bool:
        """Say whether *nbytes* equal to its own may be read from it, saved on this stream."""
        return self.nbytes == nbytes and (self.home is None or visitor_of(self.home) is None)

    def settle(self) -> None:
        """Queue the copy to the host if it was put off."""
        self._mover.settle(self.moved)

    def wait(self) -> None:
        """Order compute behind its reload, if one is under way."""
        self._mover.wait(self.moved)

    def covers(self, tensor: torch.Tensor, shares_counter: bool) -> bool:
        """Say whether this may stand for *tensor*, on the same storage and of the same version."""
        if self._regions is None:
            return super().covers(tensor, shares_counter)
        moved = self.moved
        if not moved.is_put_off:
            is_saved = any(layout.is_of(tensor) for layout in self._regions)
            return is_saved and (shares_counter or not self.version)
        if moved.is_whole:
            return True
        start, end = byte_span(tensor)
        return moved.start <= start and end <= moved.start + moved.nbytes

    def stand_for(self, layout: TensorLayout) -> None:
        """Stand for another view of the storage from now on."""
        if self._regions is not None and self.moved.is_put_off:
            self._regions.append(layout)

    def renew(self, tensor: torch.Tensor) -> None:
        """Do so on a CPU. All that saved its storage gets these bytes, as without hooks."""
        if self._mover.copy_again(self.moved, tensor):
            self.forget_handed_out()

    def tensor_on_device(self, handle: SavedTensor) -> torch.Tensor:
        """Return what *handle* stands for, over the bytes that were brought back."""
        moved = self.moved
        buffer = moved.buffer_as_it_is()
        if buffer is not None and handle.layout is self.layout:
            return buffer
        return handle.layout.view_of(self._mover.device_storage(moved), moved.decoded_start)

    def read(self) -> tuple[torch.UntypedStorage, int]:
        """Return its bytes on the device, and which byte of the original storage is the first.

        Raises:
            SavedTensorModifiedError: it was changed in place since it was saved, or backward has
                changed what it got.
        """
        if not self._is_safe:
            self.check_unmodified()
        elif self._is_changed_by_backward():
            raise modified_error(self.slot)
        return self._mover.read(self.moved)

    def survives_a_change(self) -> bool:
        """Copy its bytes away before compute changes the memory; False if the host has no room.

        Other regions of it may be changed by right while the copy is on its way.
        """
        self.settle()
        self._is_safe = self._mover.let_leave(self.moved)
        return self._is_safe

    def drop_device_copy(self) -> None:
        """Let go of what was brought back; the host still has the bytes."""
        moved = self.moved
        if moved.is_back:
            self.forget_handed_out()
            self._mover.drop_device_copy(moved)


class RebuiltStorage(WatchedStorage, abc.ABC):
    """One distinct storage that a layer call saved and that was dropped, to be rebuilt."""

    @abc.abstractmethod
    def rebuild(self) -> torch.UntypedStorage:
        """Return its bytes, on the device."""

    @abc.abstractmethod
    def forget_rebuilt(self) -> None:
        """Let go of what :meth:`rebuild` made and brought back, outside of a backward pass."""


@final
class SavedTensor:
    """Handle for one saved tensor whose storage left the device: which view to rebuild."""

    __slots__ = ("call", "layout", "storage")

    def __init__(self, storage: WatchedStorage, layout: TensorLayout, call: LayerCall) -> None:
        self.storage = storage
        self.layout = layout
        self.call = call
        """Who saved it: not always who saved its storage first, which is ``storage.call``."""

    def belong_to(self, call: LayerCall) -> None:
        """Be asked for by the backward of *call*, whoever saved it."""
        self.call = call


@final
class KeptTensor:
    """Handle for one saved tensor that stayed on the device."""

    __slots__ = ("call", "slot", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, version: int, call: LayerCall, slot: Slot) -> None:
        self.tensor = tensor
        self.version = version
        self.call = call
        self.slot = slot

    def belong_to(self, call: LayerCall) -> None:
        """Be asked for by the backward of *call*, whoever saved it."""
        self.call = call

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
class FlattenedTensor:
    """Handle for one saved tensor whose inner tensors have handles of their own."""

    __slots__ = ("_counters", "_flattening", "_handles", "call", "slot")

    def __init__(
        self,
        flattening: Flattening,
        handles: Mapping[str, Handle],
        counter: EmptiedCounter,
        call: LayerCall,
        slot: Slot,
    ) -> None:
        self._flattening = flattening
        self._handles = dict(handles)
        self._counters = [counter]
        self.call = call
        """Who saved it."""
        self.slot = slot
        """Names it in errors; it has no bytes of its own."""

    @property
    def is_modified(self) -> bool:
        """Whether it, or what backward got for it, was changed in place."""
        return any(counter.is_modified for counter in self._counters)

    def belong_to(self, call: LayerCall) -> None:
        """Be asked for by the backward of *call*, whoever saved it."""
        self.call = call
        for handle in self._handles.values():
            handle.belong_to(call)

    def give(self, unpack: Callable[[Handle], torch.Tensor]) -> torch.Tensor:
        """Return the tensor, over inner tensors that *unpack* gives; see that it is unchanged."""
        inner = {name: unpack(handle) for name, handle in self._handles.items()}
        made = self._flattening.tensor_over(inner)
        self._counters[1:] = [EmptiedCounter(made, inner)]
        return made


Handle: TypeAlias = KeptTensor | SavedTensor | StreamedTensor | FlattenedTensor
"""What autograd holds."""


def kept_as_it_is(tensor: torch.Tensor, call: LayerCall, slot: Slot) -> KeptTensor:
    """Return the handle of *tensor*, which stays on the device, saved by *call* as *slot*."""
    return KeptTensor(tensor.detach(), tensor._version, call, slot)


def whole_source(handle: Handle) -> KeptTensor | SavedStorage | None:
    """Return what reads all of a storage for *handle*, without replaying anything; else None."""
    if not isinstance(handle, SavedTensor):
        return handle if isinstance(handle, KeptTensor) else None
    record = handle.storage
    return record if isinstance(record, SavedStorage) and record.moved.is_whole else None
