"""Tells from a few elements of each weight whether the weights have changed.

An optimizer that steps inside of backward, and writes through ``.data`` or by a fused kernel,
changes no version. It changes nearly all elements of the weights that it steps, so a few elements
show it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from hf_pyao.engine.transfer.layout import has_storage

_NUM_ELEMENTS = 64
"""Sampled of each weight, evenly spread."""
_PLAIN = frozenset({Tensor, Parameter})


def samples_of(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return elements of *weights*, as they are now; empty if there is no room for them."""
    plain = (each for each in weights if type(each) in _PLAIN and has_storage(each))
    try:
        with torch.no_grad():
            return [_view_of(each).clone() for each in plain if _fills_its_bytes(each)]
    except (RuntimeError, NotImplementedError):  # no memory, or weights without bytes
        return []


def have_changed(weights: Sequence[Tensor], before: list[Tensor]) -> bool:
    """Say whether *weights* hold something else than when :func:`samples_of` returned *before*."""
    now = samples_of(weights)
    if len(now) != len(before):
        return False  # it cannot be told
    return not all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(now, before, strict=True)
    )


def _fills_its_bytes(tensor: Tensor) -> bool:
    """Say whether the elements lie side by side, in whatever order."""
    sizes, strides = tensor.size(), tensor.stride()
    span = 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    return span == tensor.numel() > 0


def _view_of(weight: Tensor) -> Tensor:
    step = max(1, weight.numel() // _NUM_ELEMENTS)
    return weight.detach().as_strided((weight.numel(),), (1,))[::step]
