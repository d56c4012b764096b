"""Slots: one name for each distinct storage that a layer call saves, or that is stored for it."""

from __future__ import annotations

from typing import NamedTuple

import torch

NO_SLOT = -1
"""Ordinal of what has a name for messages alone: parameters, buffers."""


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
    """How many distinct storages that sub-module had saved before it in this layer call; anchors
    are counted apart."""
    nbytes: int
    """Bytes that autograd would keep alive for it, or that it is stored with."""
    dtype: torch.dtype | None
    """Of the tensor that was saved first; None for what no slot is."""
    is_anchor: bool = False
    """True if autograd has not saved it: it is stored so that others can be rebuilt from it."""

    @property
    def name(self) -> str:
        """Name shared by structurally identical layers: ``self_attn.q_proj:0``, ``mlp:anchor1``."""
        kind = "anchor" if self.is_anchor else ""
        return f"{self.path}:{kind}{self.ordinal}"

    def __str__(self) -> str:
        """Return ``model.layers.0 self_attn.q_proj:0``."""
        return f"{self.layer} {self.name}"
