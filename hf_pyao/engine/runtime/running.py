"""The thread that is served: which layers it is inside of, and what ran in its forward so far."""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident

from torch import nn

from hf_pyao.engine.runtime.tape import Layer, LayerCall
from hf_pyao.engine.torch_hooks.saved_tensor_hooks import Pack
from hf_pyao.engine.transfer.graph_task import is_in_backward


class Token:
    """One layer that the thread is inside of."""

    __slots__ = ("call", "is_checkpointed", "module", "pack")

    def __init__(
        self, module: nn.Module, call: LayerCall, pack: Pack, is_checkpointed: bool
    ) -> None:
        self.module = module
        self.call = call
        self.pack = pack
        self.is_checkpointed = is_checkpointed


class Running:
    """State of the thread that is served; there is one at a time."""

    def __init__(self) -> None:
        self._thread = 0
        """The thread that is served; 0 before the first."""
        self._is_in_forward = False
        """True from the beginning of its forward until the last layer ends."""
        self._passed_over: set[int] = set()
        """Threads whose forward began while another one was served."""
        self._lock = threading.Lock()
        self._tokens: list[Token] = []
        self._runs: dict[int, int] = {}
        """How often each layer object has run in this forward, by the layer's index."""
        self._runs_before: dict[int, int] = {}
        """The same of the forward before."""
        self._num_packs_seen = -1
        """Tensors that had been packed when its newest forward began."""

    @property
    def tokens(self) -> list[Token]:
        """The layers that the calling thread is inside of, innermost last."""
        return self._tokens if get_ident() == self._thread else []

    @property
    def is_served(self) -> bool:
        """True on the thread that is served."""
        return get_ident() == self._thread

    def serve(self, *, begins: bool, is_under_way: Callable[[], bool]) -> bool:
        """Serve the calling thread from here on, if no other one is; say whether it is served.

        Code that runs inside of a backward pass, on a thread of autograd's, is always served.

        Args:
            begins: the thread begins a forward. One that was passed over is to its end.
            is_under_way: says whether a forward that has ended still waits for its backward.
        """
        here = get_ident()
        with self._lock:
            if begins:
                self._passed_over.discard(here)
            if here != self._thread and not is_in_backward():
                is_busy = self._is_in_forward or self._tokens or is_under_way()
                if here in self._passed_over or (is_busy and _is_alive(self._thread)):
                    self._passed_over.add(here)
                    return False
                self._tokens.clear()  # of a thread that ended inside of a layer
            self._thread = here
            self._is_in_forward = True
            return True

    def end_forward(self) -> None:
        """Note that the last layer has ended, or that the forward failed."""
        self._is_in_forward = False

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


def _is_alive(thread: int) -> bool:
    return any(each.ident == thread for each in threading.enumerate())
