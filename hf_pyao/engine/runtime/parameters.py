"""Recognising parameters among saved tensors. They are never moved.

Parameters reach the pack hook in four guises: as themselves, as views (``weight.t()``), as casts
that autocast made (``weight.to(bf16).t()``, whose storage is no parameter's), and as casts of
frozen weights, which have no link to their parameter left. Each guise has its own test; all four
are needed (a stored set of data pointers misses every one of them once FSDP2 has sharded).
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.nn import Parameter

from hf_pyao.engine.runtime.sharding import Sharding

VIEW_OR_CAST_NODES = frozenset(
    {
        "AliasBackward0",
        "AsStridedBackward0",
        "CloneBackward0",
        "DetachBackward0",
        "ExpandBackward0",
        "NarrowBackward0",
        "PermuteBackward0",
        "ReshapeAliasBackward0",
        "SelectBackward0",
        "SliceBackward0",
        "SplitBackward0",
        "SplitWithSizesBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "TBackward0",
        "ToCopyBackward0",
        "TransposeBackward0",
        "UnbindBackward0",
        "UnsafeSplitBackward0",
        "UnsafeViewBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
    }
)
"""Autograd nodes that change a tensor's view, place or dtype, but not what it stands for."""

_TENSOR = torch.Tensor
MAX_CHAIN = 16


class FrozenShapes:
    """Shapes of a layer's frozen weights, by which the casts that autocast makes of them are known.

    Such a cast has no link to its weight. What tells it from an activation that happens to have a
    weight's shape: ``nn.Linear`` saves the transposed *view* of the cast, so that the view's base
    has the weight's shape; a flattened activation is a view of something else, or of nothing.

    They are read when first asked for, inside the layer's forward: FSDP may gather the weights only
    after the layer was entered. An empty one (no layer, or no autocast) knows no casts.
    """

    __slots__ = ("_layer", "_sharding", "_weights")

    def __init__(self, layer: nn.Module | None = None, sharding: Sharding | None = None) -> None:
        self._layer = None if layer is None else weakref.ref(layer)
        self._sharding = sharding or Sharding()
        self._weights: dict[torch.Size, set[tuple[torch.dtype, bool]]] | None = None

    def has_cast(self, tensor: torch.Tensor) -> bool:
        """Say whether *tensor*, which has no autograd node, looks like the cast of a weight."""
        if self._layer is None or tensor.requires_grad or not tensor.is_floating_point():
            return False
        if self._weights is None:
            self._weights = _frozen_weights(self._layer(), self._sharding)
        base = tensor._base
        known = self._weights.get((tensor if base is None else base).shape, ())
        return any(
            dtype != tensor.dtype and (base is not None or not is_linear)
            for dtype, is_linear in known
        )


def is_parameter(tensor: torch.Tensor, frozen_shapes: FrozenShapes) -> bool:
    """Say whether *tensor* is a parameter, a view of one, or a cast of one.

    Args:
        tensor: a plain strided tensor, as the pack hook gets it.
        frozen_shapes: of the layer that runs, while autocast is on; else empty.
    """
    base = tensor._base
    is_plain = type(tensor) is _TENSOR and (base is None or type(base) is _TENSOR)
    if not is_plain and _is_parameter_or_view(tensor):
        return True
    node = tensor.grad_fn
    if node is None:
        return frozen_shapes.has_cast(tensor)
    if type(node).__name__ not in VIEW_OR_CAST_NODES:  # faster than its name()
        return False  # most tensors end here: made by an operation that is neither
    if base is not None and base.grad_fn is not None:
        node = base.grad_fn  # what the view was made of, without the views in between
    return _leads_to_parameter(node, tensor.numel())


def makes_new_tensors(node: torch.autograd.graph.Node | None) -> bool:
    """Say whether what *node* and its like make is no parameter, unless it is a view of one."""
    return node is not None and type(node).__name__ not in VIEW_OR_CAST_NODES


def _is_parameter_or_view(tensor: torch.Tensor) -> bool:
    base = tensor._base
    return _is_parameter_object(tensor) or (base is not None and _is_parameter_object(base))


def _is_parameter_object(tensor: torch.Tensor) -> bool:
    # The exact type first: isinstance(_, Parameter) runs Python code, and most tensors are plain.
    kind = type(tensor)
    return kind is Parameter or (kind is not torch.Tensor and isinstance(tensor, Parameter))


def _leads_to_parameter(node: torch.autograd.graph.Node, num_elements: int) -> bool:
    """Say whether *node* views or casts a parameter; a copy of it for each row is none any more."""
    for _ in range(MAX_CHAIN):
        name = node.name()
        if name == "torch::autograd::AccumulateGrad":
            leaf = node.variable  # type: ignore[attr-defined]
            return isinstance(leaf, Parameter) and num_elements <= leaf.numel()
        if name not in VIEW_OR_CAST_NODES:
            return False
        parents = node.next_functions
        if not parents or parents[0][0] is None:
            return False
        node = parents[0][0]
    return False


def _frozen_weights(
    layer: nn.Module | None, sharding: Sharding
) -> dict[torch.Size, set[tuple[torch.dtype, bool]]]:
    """Return the shapes of *layer*'s frozen weights -> dtype, and whether ``nn.Linear`` owns it.

    Weights have two or more dimensions.
    """
    found: dict[torch.Size, set[tuple[torch.dtype, bool]]] = {}
    pending = [] if layer is None else [layer]
    while pending:
        module = pending.pop()
        pending.extend(child for child in module._modules.values() if child is not None)
        for value in sharding.weights_of(module):
            if not value.requires_grad and value.dim() >= 2 and _is_parameter_or_view(value):
                is_linear = isinstance(module, nn.Linear)
                found.setdefault(value.shape, set()).add((value.dtype, is_linear))
    return found
