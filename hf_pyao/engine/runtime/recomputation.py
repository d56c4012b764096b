"""What packing and recomputation (``hf_pyao.engine.recompute``) tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Anchor(NamedTuple):
    """A value to be stored, which autograd does not save, so that others can be rebuilt from it."""

    value: Any
    """The recomputation's own."""
    tensor: torch.Tensor
    """A tensor that holds it."""
    path: str
    """Sub-module that made it; empty for the layer itself, or if that is not known."""


class Refused(NamedTuple):
    """A storage cannot be rebuilt, or had better not be."""

    reason: str
    """Short and constant, since reports count by it."""


class Recipe(NamedTuple):
    """How a storage can be rebuilt."""

    value: Any
    """The recomputation's own."""
    anchors: Sequence[Anchor]
    """What must be stored for it."""
