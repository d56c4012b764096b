"""The engine's side of recomputation: traces layer calls, drops storages, rebuilds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from hf_pyao.runtime.layout import TensorLayout
from hf_pyao.runtime.operations import Rules
from hf_pyao.runtime.parameters import is_parameter
from hf_pyao.runtime.policy import RecomputingPolicy
from hf_pyao.runtime.recompute import (
    LOST,
    Anchors,
    RecipeFinder,
    RecomputedStorage,
    Refused,
    settle,
)
from hf_pyao.runtime.replay import Replay
from hf_pyao.runtime.saved_tensor import KeptTensor, SavedStorage, SavedTensor
from hf_pyao.runtime.tape import LayerCall
from hf_pyao.runtime.tracing import Trace
from hf_pyao.runtime.values import Value
from hf_pyao.runtime.watching import SlotLabel

Handle: TypeAlias = "KeptTensor | SavedTensor"


class Recomputer:
    """Traces the layers of which *policy* may recompute something.

    Args:
        policy: says of which layers, and which matrix products may run again.
        store: stores a tensor that autograd has not saved; returns what stands for it.
        load: brings the bytes of a stored storage to the device; returns them, and which byte of
            the original storage is their first.
    """

    def __init__(
        self,
        policy: RecomputingPolicy,
        *,
        store: Callable[[LayerCall, torch.Tensor], Handle],
        load: Callable[[SavedStorage], tuple[torch.UntypedStorage, int]],
    ) -> None:
        self._policy = policy
        self._store = store
        self._load = load
        self._rules = Rules()
        self.on_trace: Callable[[LayerCall, Trace], None] | None = None
        """Called with each finished trace, before it is forgotten; for whoever studies them."""

    # ---- forward -------------------------------------------------------------------------------

    def open(
        self,
        call: LayerCall,
        reason_not_traceable: Callable[[], str | None],
        buffer_keys: frozenset[int],
    ) -> None:
        """Trace *call*, if anything of it is to be recomputed and it can be traced."""
        products = self._policy.products_to_replay(call.fqn)
        if products is None:
            return
        call.reason_not_traced = reason_not_traceable()
        if call.reason_not_traced is not None:
            return
        frozen_shapes = call.frozen_shapes

        def is_constant(tensor: torch.Tensor, key: int) -> bool:
            return key in buffer_keys or is_parameter(tensor, frozen_shapes)

        call.replay = Replay()
        call.trace = Trace(call.paths, products, is_constant, self._rules)
        call.trace.start()

    def close(self, call: LayerCall) -> None:
        """End the trace of *call*. Recipes keep of it what they need."""
        trace = call.trace
        if trace is not None:
            trace.stop()  # first: an interrupt must leave it where it is found again
            if self.on_trace is not None:
                self.on_trace(call, trace)
            call.trace = None
            trace.close()

    def note_stored(
        self, call: LayerCall, storage: torch.UntypedStorage, tensor: torch.Tensor, handle: Handle
    ) -> None:
        """Note that *storage* will be there in backward, so that recipes may end in it."""
        if call.trace is None:
            return
        value = call.trace.value_of(tensor, storage)
        source = handle if isinstance(handle, KeptTensor) else handle.storage
        if isinstance(source, SavedStorage) and not source.is_whole:
            return  # a small view of it
        if value.source is None and not value.is_blocked:
            value.source = source
            value.producer = None

    def producer_of(self, call: LayerCall, storage: torch.UntypedStorage) -> str | None:
        """Return the sub-module that made *storage*'s content; None if that was not seen."""
        if call.trace is None:
            return None
        value = call.trace.values.get(storage._cdata)
        return None if value is None or value.producer is None else value.producer.path

    def drop(
        self,
        call: LayerCall,
        tensor: torch.Tensor,
        layout: TensorLayout,
        storage: torch.UntypedStorage,
        slot: SlotLabel,
    ) -> RecomputedStorage | None:
        """Find a recipe for *storage*; None, with the reason counted, if there is none."""
        value = None
        found: Anchors | Refused = Refused(call.reason_not_traced or LOST)
        if call.trace is not None:
            value = call.trace.value_of(tensor, storage)
            dropped: RecomputedStorage | None = None if value.slot is None else value.slot()
            if dropped is not None:  # what was noted for its storage is gone: the tape was closed
                dropped.stand_for(layout)
                if not dropped.shares_counter_with(tensor):
                    dropped.watch(tensor, layout)
                return dropped
            found = RecipeFinder(call.trace).find(value)
        if value is None or isinstance(found, Refused):
            assert isinstance(found, Refused)
            call.tape.stats.not_recomputed_bytes[found.reason] += storage.nbytes()
            return None
        for anchor, anchor_tensor in found.items():
            self._anchor(call, anchor, anchor_tensor)
        settle(value)
        record = RecomputedStorage(call, slot, value, tensor, layout)
        assert call.replay is not None
        call.replay.add(record)
        call.tape.stats.recomputed_bytes += value.nbytes
        return record

    def _anchor(self, call: LayerCall, value: Value, tensor: torch.Tensor) -> None:
        """Store *value* for a recipe."""
        handle = self._store(call, tensor)
        value.source = handle if isinstance(handle, KeptTensor) else handle.storage
        value.producer = None

    # ---- backward ------------------------------------------------------------------------------

    def rebuild(self, record: RecomputedStorage) -> torch.UntypedStorage:
        """Return the bytes of a dropped storage, on the device."""
        replay = record.call.replay
        assert replay is not None
        return replay.rebuild(record, self._bytes_of)

    def sources(self, record: RecomputedStorage) -> list[SavedStorage]:
        """Return the offloaded storages that *record* is rebuilt from."""
        replay = record.call.replay
        assert replay is not None
        return [source for source in replay.sources(record) if isinstance(source, SavedStorage)]

    def _bytes_of(self, source: Any) -> tuple[torch.UntypedStorage, int]:
        source.check_unmodified()
        if isinstance(source, KeptTensor):
            return source.tensor.untyped_storage(), 0
        return self._load(source)
