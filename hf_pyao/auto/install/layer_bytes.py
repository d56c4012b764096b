"""What became of each layer's saved tensors, for a run's report.

Hearing of every slot costs time in each pack, so that few micro-batches are listened to: the first,
the second, the fourth and so on. The newest of them counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.engine.runtime.observer import Observer
from hf_pyao.engine.runtime.policy import Decision, Offload, Recompute
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.engine.weak_calls import weakly
from hf_pyao.metrics import MicroBatchStats
from hf_pyao.plan.documents.run import LayerBytes

_KEPT, _MOVED, _RECOMPUTED = range(3)
_KIND_OF = {Offload: _MOVED, Recompute: _RECOMPUTED}


class LayerBytesWatch(Observer):
    """Adds up the bytes that each layer keeps, moves and recomputes in one micro-batch.

    The bytes are those that were decided on: what found no room on the host counts as moved.

    Args:
        engine: whose slots are heard of.
        layer_names: qualified names, in forward order.
        streamed_bytes: returns the bytes of weights that are streamed, by layer.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        layer_names: Sequence[str],
        streamed_bytes: Callable[[], Mapping[str, int]],
    ) -> None:
        self._engine = weakref.ref(engine)
        self._names = tuple(layer_names)
        self._streamed_bytes = streamed_bytes
        self._goes_on = True
        """Whether the micro-batch that follows is listened to."""
        self._is_whole = True
        """Whether the newest forward has come to its last layer."""
        self._counted: dict[str, list[int]] = {}
        self.layers: list[LayerBytes] = []
        """Of the newest micro-batch that was heard; empty before the first."""

    def start(self) -> None:
        """Listen to the next micro-batch, and to some of those after it."""
        engine = self._engine()
        if engine is not None:
            engine.figures.tell_when_counted(weakly(self._micro_batch_counted, None))
            engine.observe_too(self)

    def _micro_batch_counted(self, num_counted: int) -> None:
        """Hear that a micro-batch is over, which was listened to or not."""
        engine, following = self._engine(), num_counted + 1
        self._goes_on = following & num_counted == 0
        if engine is not None and self._goes_on:
            engine.stop_observing(self)
            engine.observe_too(self)

    def on_module(self, layer: str, path: str, phase: str, *, is_start: bool) -> None:
        """Forget a forward that did not come to its end."""
        if is_start and not path and phase == "forward":
            if layer == self._names[0] and not self._is_whole:
                self._counted = {}
            self._is_whole = layer == self._names[-1]

    def on_slot(self, slot: Slot, stays: str | None, decision: Decision) -> None:
        """Add the bytes of *slot*."""
        kind = _KEPT if stays else _KIND_OF.get(type(decision), _KEPT)
        self._counted.setdefault(slot.layer, [0, 0, 0])[kind] += slot.nbytes

    def on_dropped(self, layer: str, nbytes: int, *, stays: bool) -> None:
        """Add the bytes of what is made again with its layer."""
        kind = _KEPT if stays else _RECOMPUTED
        self._counted.setdefault(layer, [0, 0, 0])[kind] += nbytes

    def on_micro_batch(self, stats: MicroBatchStats) -> None:
        """Take what was heard; listen no more, unless to the next."""
        counted, self._counted = self._counted, {}
        streamed = self._streamed_bytes()
        self.layers = [
            LayerBytes(
                layer=name,
                kept_bytes=kept,
                moved_bytes=moved,
                recomputed_bytes=recomputed,
                streamed_weight_bytes=streamed.get(name, 0),
            )
            for name in self._names
            for kept, moved, recomputed in [counted.get(name, [0, 0, 0])]
        ]
        engine = self._engine()
        if engine is not None and not self._goes_on:
            engine.stop_observing(self)
