"""Sees in-place changes of saved tensors, as autograd does where no hooks are set.

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

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from hf_pyao.errors import SavedTensorModifiedError
from hf_pyao.runtime.layout import byte_span

if TYPE_CHECKING:
    from hf_pyao.runtime.compute_streams import Home
    from hf_pyao.runtime.layout import TensorLayout
    from hf_pyao.runtime.saved_tensor import SavedTensor
    from hf_pyao.runtime.tape import LayerCall


class SlotLabel(NamedTuple):
    """Names a slot of a layer; put into words only where a message needs it."""

    layer: str
    path: str
    """Sub-module that saved it first; empty for the layer itself."""
    ordinal: int
    """How many distinct storages that sub-module had saved before; -1 for what is no slot."""

    @property
    def name(self) -> str:
        """Name shared by structurally identical layers, such as ``self_attn.q_proj:0``."""
        return f"{self.path}:{self.ordinal}"

    def __str__(self) -> str:
        """Return ``model.layers.0 self_attn.q_proj:0``."""
        return f"{self.layer} {self.name}"


def modified_error(slot: SlotLabel) -> SavedTensorModifiedError:
    """Build the error that autograd's version check would have raised without hooks."""
    return SavedTensorModifiedError(
        f"one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: the tensor saved as slot {slot.name!r} of layer {slot.layer!r} was changed "
        "after it was saved, before backward used it. Use the out-of-place form of the operation, "
        "or clone the tensor before changing it. (It fails in the same way without hf_pyao.)"
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
    """What stands for a saved storage whose device memory is let go.

    In-place changes raise when it is asked for: see [Note: In-place changes].
    """

    home: Home | None = None
    """The compute stream that its memory belongs to; None on a CPU. See [Note: Stream order]."""
    lingering: torch.UntypedStorage | None = None
    """Its source, which others held yet when it was let go; with several compute streams only."""
    _other_watches: list[VersionWatch] | None = None
    _handed_out: list[tuple[torch.Tensor, int, TensorLayout]] | None = None
    """Tensors that backward got, over one rebuilt storage; their versions then; their layouts in
    the original storage."""

    def __init__(
        self,
        call: LayerCall,
        slot: SlotLabel,
        nbytes: int,
        tensor: torch.Tensor,
        layout: TensorLayout,
    ) -> None:
        """Watch *tensor*, which still holds its memory: see :meth:`let_go_of_source`."""
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
        self._counter = tensor.detach()

    @property
    def device(self) -> torch.device:
        """Where the storage was."""
        return self.layout.blank.device

    def let_go_of_source(self) -> None:
        """Let go of the saved tensor's memory, which the version counter shares so far."""
        self._counter.data = self.layout.blank

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
        """Take note of *tensor*, which goes to backward; return it.

        Autograd would raise if one node changed it in place and another asked for it later.

        Args:
            tensor: over a storage that was brought back or rebuilt.
            handle: what it stands for.
        """
        note = (tensor, tensor._version, handle.layout)
        if self._handed_out is None:
            self._handed_out = [note]
        else:
            self._handed_out.append(note)
        return tensor

    def handed_out_like(self, handle: SavedTensor) -> torch.Tensor | None:
        """Return a tensor that backward got already, if it is just what *handle* stands for.

        It shares the version counter of the one before, so that there is one to look at however
        many nodes saved the tensor.
        """
        for tensor, _, layout in self._handed_out or ():
            if layout is handle.layout:
                return tensor.detach()
        return None

    def forget_handed_out(self) -> None:
        """Let go of what backward got; if it was changed meanwhile, that is remembered."""
        if self._handed_out is not None:
            if self._is_changed_by_backward():
                self.version = -1
            self._handed_out = None

    def _is_changed_by_backward(self) -> bool:
        for tensor, version, _ in self._handed_out or ():
            if tensor._version != version:
                return True
        return False

    def stand_for(self, layout: TensorLayout) -> None:
        """Take note that this stands for another view of the storage from now on."""

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
        if self._handed_out is not None:
            is_modified |= self._is_changed_by_backward()
        if is_modified:
            raise modified_error(self.slot)
