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


class WeightSamples:
    """Takes samples of weights. Views of them are made once, and again when weights have moved.

    They are views of the bytes, and hold them as long as the weights do.
    """

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._views: list[Tensor] = []

    def take(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return elements of *parameters*, as they are now; empty if there is no room for them."""
        try:
            plain = [each for each in parameters if type(each) in _PLAIN and has_storage(each)]
            addresses = [each.data_ptr() for each in plain]
            if addresses != self._addresses:
                self._addresses = addresses
                self._views = [_view_of(each) for each in plain if _fills_its_bytes(each)]
            with torch.no_grad():
                return [view.clone() for view in self._views]
        except (RuntimeError, NotImplementedError):  # no memory, or weights without bytes
            self._addresses, self._views = [], []
            return []

    def have_changed(self, parameters: Sequence[Tensor], before: list[Tensor]) -> bool:
        """Say whether *parameters* hold something else than :meth:`take` returned."""
        now = self.take(parameters)
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


def _view_of(parameter: Tensor) -> Tensor:
    step = max(1, parameter.numel() // _NUM_ELEMENTS)
    return parameter.detach().as_strided((parameter.numel(),), (1,))[::step]
