"""What both sides of the saved-tensor hooks know: who is told, and which weights are streamed."""

from __future__ import annotations

from hf_pyao.engine.runtime.observer import Observer
from hf_pyao.engine.runtime.streamed_weights import StreamedWeights


class HookSide:
    """Packing or unpacking."""

    def __init__(self) -> None:
        self.observer: Observer | None = None
        """Is told of what is packed or unpacked; None: nobody is."""
        self.weights: StreamedWeights | None = None
        """Weights that are streamed; None: all are on the device."""

    def tell(self, observer: Observer | None) -> None:
        """Tell *observer* from here on; None: nobody."""
        self.observer = observer

    def recognise(self, weights: StreamedWeights | None) -> None:
        """Recognise *weights*, which are streamed; None: all are on the device."""
        self.weights = weights
