"""What the runtime knows of streamed weights: how to tell one, and how to get it again.

``hf_pyao.engine.weights`` implements it. A saved tensor that lies in a block is replaced
by a handle: the graph holds no byte of a frozen weight after forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, final

import torch

from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.engine.runtime.tape import LayerCall

if TYPE_CHECKING:
    from hf_pyao.engine.recompute.trace_values import Source


class StreamedWeights(Protocol):
    """Weights that come to the device for as long as they are used."""

    def find(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Return what gives *tensor* again, if it is a view of a streamed weight; else None."""
        ...

    def find_block(self, tensor: torch.Tensor) -> Source | None:
        """Return what gives the bytes of *tensor*'s block again; None if it lies in none."""
        ...

    def begin_forward(self, *, trains: bool) -> None:
        """Note that a forward begins; *trains*: with gradients."""
        ...

    def refuse_compiled(self) -> None:
        """Refuse to go on in compiled code, which reads weights by itself."""
        ...

    def begin_backward(self, layer: int) -> None:
        """Have the weights of layer number *layer* on the device, whose backward begins."""
        ...

    def stalls_ms(self) -> tuple[float, float]:
        """Return how long forward and backward compute have waited for uploads, in ms."""
        ...

    def upload_ahead(self) -> None:
        """Queue the upload of the weights that are used next, if there is room for them."""
        ...


@final
class StreamedTensor:
    """Handle for one saved tensor that is a view of a streamed weight."""

    __slots__ = ("_give", "call", "slot")

    def __init__(self, give: Callable[[], torch.Tensor], call: LayerCall, slot: Slot) -> None:
        self._give = give
        self.call = call
        self.slot = slot

    def belong_to(self, call: LayerCall) -> None:
        """Be asked for by the backward of *call*, whoever saved it."""
        self.call = call

    def give(self) -> torch.Tensor:
        """Return the tensor, over its block, which is there again."""
        return self._give()

    def check_unmodified(self) -> None:
        """Do nothing: who gives the tensor looks whether its weight has changed."""

    def survives_a_change(self) -> bool:
        """Return True: what is read is not the memory that was saved."""
        return True

    def read(self) -> tuple[torch.UntypedStorage, int]:
        """Return its storage, as ``SavedStorage.read`` does."""
        return self._give().untyped_storage(), 0
