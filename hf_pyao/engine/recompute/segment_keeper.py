"""What segments keep goes to the engine; what they drop is counted as the engine counts it."""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hf_pyao.engine.recompute.kept_attention import SeenAttention
from hf_pyao.engine.recompute.operations import Rules
from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.engine.runtime.parameters import is_parameter
from hf_pyao.engine.runtime.saved_tensor import Handle
from hf_pyao.engine.runtime.streamed_weights import StreamedTensor
from hf_pyao.engine.runtime.tape import LayerCall, Tape
from hf_pyao.engine.transfer.layout import Stays, is_plain


class Keeper:
    """Has the engine keep the inputs of segments, as what their first layer saves."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self.rules = Rules()
        self._counted: weakref.WeakKeyDictionary[Tape, dict[int, StorageWeakRef]] = (
            weakref.WeakKeyDictionary()
        )
        """Of each forward the storages that were counted, by address: it is not used again as long
        as there is a reference."""

    def streamed(self, call: LayerCall, tensor: Tensor) -> StreamedTensor | None:
        """Return what stands for *tensor* if it is a view of a streamed weight; else None."""
        weights = self._engine.weights
        give = None if weights is None else weights.find(tensor)
        if give is None:
            return None
        return StreamedTensor(give, call, call.layer.unnamed(call.paths[-1]))

    def note_dropped(self, call: LayerCall, tensor: Tensor) -> None:
        """Count *tensor*'s storage, which autograd would hold and which is made again instead."""
        if not is_plain(tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        seen = self._counted.get(call.tape)
        if seen is None:
            seen = self._counted[call.tape] = {}
        if key in seen or key in call.table.entries or key in self._engine.packer.buffer_keys:
            return
        if is_parameter(tensor, call.frozen_shapes):
            return
        seen[key] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._count(call, key, storage.nbytes())

    def _forget_dropped(self, call: LayerCall, tensor: Tensor) -> None:
        """Take back what was counted for *tensor*, which the engine is to keep after all."""
        if not is_plain(tensor):
            return
        storage = tensor.untyped_storage()
        if self._counted.get(call.tape, {}).pop(storage._cdata, None) is not None:
            self._count(call, storage._cdata, -storage.nbytes())

    def _count(self, call: LayerCall, key: int, nbytes: int) -> None:
        """Count *nbytes* of a storage that *call* saves and does not give to the engine."""
        stats, stays = call.stats, key in call.shared_keys
        stats.would_hold_bytes += nbytes
        if stays:
            stats.kept_bytes[Stays.SHARED] += nbytes
        else:
            stats.recomputed_bytes += nbytes
        if self._engine.observer is not None:
            self._engine.observer.on_dropped(call.fqn, nbytes, stays=stays)

    def keep_input(self, call: LayerCall, tensor: Tensor) -> Handle:
        """Take *tensor* over, the input of *call*."""
        call.enter("", None)  # whichever sub-module it is that saves something first
        try:
            return self.keep(call, tensor)
        finally:
            call.leave()

    def keep(self, call: LayerCall, tensor: Tensor) -> Handle:
        """Take *tensor* over, which the sub-module that runs has made."""
        self._forget_dropped(call, tensor)
        return self._engine.pack_of(call)(call, tensor)

    def give(self, handle: Handle, call: LayerCall) -> Tensor:
        """Give it back to the backward of *call*, the segment's last, which has begun.

        The first one's has not: a call's backward begins as a gradient reaches its outputs.
        """
        handle.belong_to(call)
        return self._engine.unpack_hook(handle)

    def attention(self, hidden: Tensor, num_segments: int) -> SeenAttention:
        """Return what sees the kernels of attention of a layer call.

        What they return leaves where the host has room for it beside the inputs of the segments
        that are still to come in this forward.

        Args:
            hidden: the input of such a segment.
            num_segments: how many come.
        """
        reserved_bytes, tiers = num_segments * hidden.nbytes, self._engine.link.tiers
        return SeenAttention(self.rules, lambda nbytes: tiers.has_room(nbytes + reserved_bytes))
