"""Forwards that stand for those of layers and modules while weights are streamed."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_pyao.engine.weights.checkpointed import weights_kept_from_checkpoints
from hf_pyao.engine.weights.ring import WeightRing
from hf_pyao.model.patching.lasting_forward import Args, Kwargs, LeftBehind, Method


class ModuleForward(LeftBehind):
    """Runs a module that has streamed weights, in a layer of several blocks.

    See ``engine/weights/checkpointed.py``.

    Args:
        ring: what brings them.
        layer: number of the layer.
        has_groups: the module has experts in groups; False: other weights.
    """

    def __init__(self, ring: WeightRing, layer: int, *, has_groups: bool) -> None:
        self._ring = ring
        self._layer = layer
        self._has_groups = has_groups

    def run(self, module: nn.Module, own: Method, args: Args, kwargs: Kwargs) -> Any:
        """Return what the module's own forward returns."""
        with weights_kept_from_checkpoints(self._ring.find, type(module).__name__):
            self._ring.begin_groups(self._layer, are_read=self._has_groups)
            return own(*args, **kwargs)


class LayerForward(LeftBehind):
    """Has a layer's weights on the device while its forward runs."""

    def __init__(self, ring: WeightRing, index: int) -> None:
        self._ring = ring
        self._index = index

    def run(self, module: nn.Module, own: Method, args: Args, kwargs: Kwargs) -> Any:
        """Return what the layer's own forward returns."""
        with self._ring.inside(self._index):
            return own(*args, **kwargs)


class QuantisedForward(LeftBehind):
    """Runs a quantised linear layer, whose nodes of the graph keep its weight."""

    def __init__(self, ring: WeightRing, block: int) -> None:
        self._ring = ring
        self._block = block

    def run(self, module: nn.Module, own: Method, args: Args, kwargs: Kwargs) -> Any:
        """Return what the module's own forward returns."""
        return self._ring.holding(self._block, lambda: own(*args, **kwargs))
