"""Slots: one name for each distinct storage that a layer call saves, or that is stored for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

NO_SLOT = -1
"""Ordinal of what has a name for messages alone: parameters, buffers."""


ANCHOR = "anchor"
"""What autograd has not saved: it is stored so that others can be rebuilt from it."""

SHARED = "shared"
"""What other layers get too (a mask, a rotary table). The first layer that saves it has the slot,
the others have none: it is counted apart, or ordinals of equal layers would differ."""


class Slot(NamedTuple):
    """One distinct storage of a layer call: what policies decide on, and plans and reports name.

    Structurally identical layers save under the same :attr:`name`, and a layer that runs again
    saves under the same slots, as long as it computes the same.
    """

    layer: str
    """Qualified name of the layer."""
    layer_index: int
    """Position of the layer in forward order."""
    path: str
    """Sub-module of the layer that saved it first, or made it if it is an anchor; empty for the
    layer itself."""
    ordinal: int
    """How many distinct storages of its kind that sub-module had saved before it in this layer
    call."""
    nbytes: int
    """Bytes that autograd would keep alive for it, or that it is stored with."""
    dtype: torch.dtype | None
    """Of the tensor that was saved first; None for what no slot is."""
    kind: str = ""
    """:data:`ANCHOR`, :data:`SHARED`, or empty for all others."""

    @property
    def name(self) -> str:
        """Name shared by structurally identical layers: ``self_attn.q_proj:0``, ``mlp:anchor1``."""
        return f"{self.path}:{self.kind}{self.ordinal}"

    @property
    def is_anchor(self) -> bool:
        """True if autograd has not saved it."""
        return self.kind == ANCHOR

    def __str__(self) -> str:
        """Return ``model.layers.0 self_attn.q_proj:0``."""
        return f"{self.layer} {self.name}"
