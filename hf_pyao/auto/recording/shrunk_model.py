"""Takes equal layers out of a model that is only recorded: four of them represent all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from hf_pyao.auto.recording.quantised_copies import tensors_beside
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.plan.step.stretch import NUM_RECORDED
from hf_pyao.training_engines import local_part


@dataclass(frozen=True)
class RemovedLayers:
    """What was taken out."""

    layer_names: tuple[str, ...]
    """Qualified names of the layers that the model had, in forward order."""
    nbytes: int
    """Bytes of the parameters and buffers that went."""
    container: nn.ModuleList = field(compare=False, repr=False)
    """The list that held the layers."""
    layers: tuple[nn.Module, ...] = field(compare=False, repr=False)
    """What it held."""

    def take_out(self) -> None:
        """Remove them from the model, which has them all."""
        half = NUM_RECORDED // 2
        del self.container[half : len(self.container) - half]

    def put_back(self) -> None:
        """Give the model its layers again."""
        del self.container[:]
        self.container.extend(self.layers)


class EqualLayers:
    """Removes all layers of a model but the first two and the last two, if all are equal.

    Models are looked through once: whoever records them leaves them as they were.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, RemovedLayers | None] = WeakKeyDictionary()

    def remove(self, model: nn.Module) -> RemovedLayers | None:
        """Remove them from *model*.

        Returns:
            What went; None if the layers differ, or there are no more than that: the model is as it
            was then.
        """
        if model not in self._known:
            self._known[model] = _equal_layers(model)
        known = self._known[model]
        if known is not None:
            known.take_out()
        return known


def _equal_layers(model: nn.Module) -> RemovedLayers | None:
    """Return what can be removed of *model*, which is as it was afterwards."""
    layers = find_layers(model).layers
    names = tuple(name for name, _ in layers)
    if len(layers) <= NUM_RECORDED or len({_structure(layer) for _, layer in layers}) > 1:
        return None
    container = _list_of([layer for _, layer in layers], model)
    if container is None:
        return None
    before_bytes, found = _bytes_of(model), RemovedLayers(names, 0, container, tuple(container))
    found.take_out()
    left_bytes = _bytes_of(model)
    found.put_back()
    return replace(found, nbytes=before_bytes - left_bytes)


def _list_of(layers: Sequence[nn.Module], model: nn.Module) -> nn.ModuleList | None:
    """Return the list in *model* that holds *layers* and nothing else; None if there is none."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(layers):
            if all(own is layer for own, layer in zip(module, layers, strict=True)):
                return module
    return None


def _structure(layer: nn.Module) -> tuple[Any, ...]:
    """Return what two layers have in common if they run the same operations."""
    modules = tuple(
        (name, type(module), module.extra_repr(), _settings(module))
        for name, module in layer.named_modules()
    )
    tensors = tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]
    )
    return modules, tensors


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Return a module's plain attributes, but those that number it."""
    return tuple(
        sorted(
            (name, repr(value))
            for name, value in vars(module).items()
            if name[0] != "_" and not name.endswith(("idx", "index", "layer_id"))
            if value is None or isinstance(value, bool | int | float | str)
        )
    )


def _bytes_of(model: nn.Module) -> int:
    own = (*model.parameters(), *model.buffers())
    tensors = [*map(local_part, own), *(each for _, each in tensors_beside(model))]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())
