"""Where a thread is: the layers that it is inside of, and what ran in its forward so far."""

from __future__ import annotations

import threading

from torch import nn

from hf_pyao.engine.runtime.tape import Layer, LayerCall
from hf_pyao.engine.torch_hooks.saved_tensor_hooks import Pack


class Token:
    """One layer that this thread is inside of."""

    __slots__ = ("call", "is_checkpointed", "module", "pack")

    def __init__(
        self, module: nn.Module, call: LayerCall, pack: Pack, is_checkpointed: bool
    ) -> None:
        self.module = module
        self.call = call
        self.pack = pack
        self.is_checkpointed = is_checkpointed


class Running(threading.local):
    """State of the calling thread."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        """The layers that it is inside of, innermost last."""
        self._runs: dict[int, int] = {}
        """How often each layer object has run in this forward, by the layer's index."""
        self._runs_before: dict[int, int] = {}
        """The same of the forward before."""
        self._num_packs_seen = -1
        """Tensors that had been packed when its newest forward began."""

    def enter(self, token: Token) -> None:
        """Enter another layer."""
        self.tokens.append(token)

    def begin_forward(self, num_packs: int) -> bool:
        """Note that a forward begins; say whether anything was packed since the one before."""
        self._runs_before, self._runs = self._runs, {}
        seen, self._num_packs_seen = self._num_packs_seen, num_packs
        return num_packs != seen

    def forget_forward(self) -> None:
        """Take the newest forward back, which failed: it tells nothing about the next."""
        self._runs = self._runs_before
        self._num_packs_seen = -1

    def count_run(self, layer: Layer) -> bool:
        """Count a run of *layer*; say whether it is the last one in this forward.

        How often a layer runs is known from the forward before.
        """
        index = layer.index
        count = self._runs[index] = self._runs.get(index, 0) + 1
        return count >= self._runs_before.get(index, 1)
