"""Tells from a few elements of each weight whether the weights have changed.

An optimizer that steps inside of backward, and writes through ``.data`` or by a fused kernel,
changes no version. It changes nearly all elements of the weights that it steps, so a few elements
show it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from hf_pyao.engine.transfer.layout import has_storage

_NUM_ELEMENTS = 256
"""Sampled of each weight, spread over it."""
_MOST_WHOLE = 4096
"""Elements up to which all are compared."""
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
    """Return some elements of *weight*; all of them if they are few."""
    flat = weight.detach().as_strided((weight.numel(),), (1,))
    if weight.numel() <= _MOST_WHOLE:
        return flat
    return flat[_places_in(weight.numel()).to(weight.device)]


@functools.lru_cache
def _places_in(numel: int) -> Tensor:
    """Return where elements are sampled: one at random of each of equal parts.

    So no row, column or diagonal has all of them.
    """
    generator = torch.Generator().manual_seed(numel)
    shares = torch.rand(_NUM_ELEMENTS, generator=generator, dtype=torch.float64)
    starts = torch.arange(_NUM_ELEMENTS, dtype=torch.float64)
    return ((starts + shares) * (numel / _NUM_ELEMENTS)).long().clamp_(max=numel - 1)
