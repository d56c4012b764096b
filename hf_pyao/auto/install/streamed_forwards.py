"""Forwards that stand for those of layers and of linear modules while weights are streamed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_pyao.engine.weights.checkpointed import weights_kept_from_checkpoints
from hf_pyao.engine.weights.ring import WeightRing
from hf_pyao.engine.weights.tables import StreamedTable
from hf_pyao.model.patching.exchanged_forwards import has_forward_of_its_own
from hf_pyao.model.patching.lasting_forward import LeftBehind
from hf_pyao.training_engines import package_of


class ModuleForward(LeftBehind):
    """Runs a module that has streamed weights.

    Args:
        ring: what brings them.
        casts: cast the weight of a linear module as autocast would, so that the cast is known as
            its.
        is_in_blocks: the layer has several blocks; see ``engine/weights/checkpointed.py``.
    """

    def __init__(self, ring: WeightRing, *, casts: bool, is_in_blocks: bool) -> None:
        self._ring = ring
        self._casts = casts
        self._is_in_blocks = is_in_blocks

    def run(
        self,
        module: nn.Module,
        own: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return what the module's own forward returns."""
        with contextlib.ExitStack() as stack:
            if self._is_in_blocks:
                name = type(module).__name__
                stack.enter_context(weights_kept_from_checkpoints(self._ring.find, name))
            if self._casts:
                stack.enter_context(self._cast(module))
            return own(*args, **kwargs)

    def _cast(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        device_type = self._ring.device.type
        weight = dict.get(module._parameters, "weight")
        if weight is None or not torch.is_autocast_enabled(device_type):
            return contextlib.nullcontext()  # without a weight: it was pruned since
        dtype = torch.get_autocast_dtype(device_type)
        if weight.dtype == dtype:
            return contextlib.nullcontext()
        return self._ring.casts(weight, dtype)


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


def module_forward(
    module: nn.Module, ring: WeightRing, *, is_in_blocks: bool
) -> ModuleForward | None:
    """Return what has to run *module*; None where its own forward may.

    Args:
        module: of a layer; its table gives streamed weights.
        ring: what brings them.
        is_in_blocks: the layer has several blocks.
    """
    if not isinstance(module._parameters, StreamedTable):
        return None
    casts = is_cast_by_autocast(module)
    if not (casts or is_in_blocks):
        return None
    return ModuleForward(ring, casts=casts, is_in_blocks=is_in_blocks)


def is_cast_by_autocast(module: nn.Module) -> bool:
    """Say whether autocast casts the weight of *module* for one product, in its own forward."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dtype != torch.float32 or has_forward_of_its_own(module):
        return False
    kind = type(module)
    if kind.forward is nn.Linear.forward:
        return True
    return kind.__name__ == "Conv1D" and package_of(kind) == "transformers"
