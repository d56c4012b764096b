"""Recognises the casts that autocast makes of one tensor for several projections.

Query, key and value projections read the same hidden states, and so do gate and up projections.
Under autocast each ``nn.Linear`` casts them for itself: distinct storages with equal values, of
which only one needs to be moved. Two storages are equal if both are casts of one tensor at one
version, which the graph shows: see :func:`cast_key`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn

MAX_VIEWS = 4
"""Views between a cast and what a projection saves of it."""

_VIEWS = frozenset({"ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0"})

CastKey: TypeAlias = tuple[Any, ...]
"""What the value of a cast follows from. It holds a node of the graph: keep it no longer than the
layer's forward."""


def casts_its_input(module: nn.Module) -> bool:
    """Say whether autocast casts *module*'s input at once, unchanged, and for it alone."""
    return type(module) is nn.Linear and "forward" not in vars(module)


def cast_key(tensor: torch.Tensor, source: torch.Tensor) -> CastKey | None:
    """Return what tells *tensor*'s value, if it is a cast (or a view of one) of *source*.

    Args:
        tensor: saved by a projection that runs now.
        source: the projection's input, which nothing has changed since the cast.

    Returns:
        A key, equal for casts of one tensor at one version to one dtype; None if *tensor* is no
        such cast, or if that cannot be told because nothing requires gradients.
    """
    origin = source.grad_fn
    node = tensor.grad_fn
    if origin is None or tensor.dtype == source.dtype or tensor.numel() != source.numel():
        return None
    if tensor._version:
        return None  # it was changed since it was cast
    for _ in range(MAX_VIEWS):
        if node is None:
            return None
        name = node.name()
        parent, output_number = node.next_functions[0]
        if name == "ToCopyBackward0":
            if parent is not origin or output_number != source.output_nr:
                return None
            return (origin, output_number, source._cdata, source._version, tensor.dtype)
        if name not in _VIEWS:
            return None
        node = parent
    return None
