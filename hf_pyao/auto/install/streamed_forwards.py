"""Forwards that stand for those of layers and of linear modules while weights are streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_pyao.engine.weights.ring import WeightRing
from hf_pyao.model.patching.exchanged_forwards import has_forward_of_its_own
from hf_pyao.model.patching.lasting_forward import LeftBehind
from hf_pyao.training_engines import package_of


class LayerForward(LeftBehind):
    """Has a layer's weights on the device while its forward runs."""

    def __init__(self, ring: WeightRing, index: int) -> None:
        self._ring = ring
        self._index = index

    def run(
        self,
        module: nn.Module,
        own: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return what the layer's own forward returns."""
        with self._ring.inside(self._index):
            return own(*args, **kwargs)


class CastingForward(LeftBehind):
    """Casts the weight of a linear module as autocast would, so that the cast is known as its."""

    def __init__(self, ring: WeightRing, device_type: str) -> None:
        self._ring = ring
        self._device_type = device_type

    def run(
        self,
        module: nn.Module,
        own: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return what the module's own forward returns."""
        if not torch.is_autocast_enabled(self._device_type):
            return own(*args, **kwargs)
        weight = dict.get(module._parameters, "weight")
        assert weight is not None
        dtype = torch.get_autocast_dtype(self._device_type)
        if weight.dtype == dtype:
            return own(*args, **kwargs)
        with self._ring.casts(weight, dtype):
            return own(*args, **kwargs)


def is_cast_by_autocast(module: nn.Module) -> bool:
    """Say whether autocast casts the weight of *module* for one product, in its own forward."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dtype != torch.float32 or has_forward_of_its_own(module):
        return False
    kind = type(module)
    if kind.forward is nn.Linear.forward:
        return True
    return kind.__name__ == "Conv1D" and package_of(kind) == "transformers"
