"""Model outputs whose logits are computed when they are read.

A model's output holds :class:`DeferredLogits` after a training forward. Whoever reads it by name
(``outputs.logits``, ``outputs["logits"]``, ``outputs[1]``) gets a tensor; whoever walks through all
of it (DDP, FSDP, ``accelerate``'s casting) gets the stand-in and computes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers.utils.generic import ModelOutput

from hf_pyao.losses import DeferredLogits


def read_lazily(outputs: Any) -> Any:
    """Make a ModelOutput compute its logits when they are read; return anything else as it is."""
    if isinstance(outputs, ModelOutput):
        outputs.__class__ = lazy_class(type(outputs))
    return outputs


def replace_deferred(outputs: Any, replace: Callable[[DeferredLogits], Any]) -> Any:
    """Return *outputs* (a ModelOutput or a tuple) with each stand-in on its top level replaced."""
    if isinstance(outputs, ModelOutput):
        for key, value in list(outputs.items()):
            if isinstance(value, DeferredLogits):
                outputs[key] = replace(value)
    elif isinstance(outputs, tuple):
        items = [replace(item) if isinstance(item, DeferredLogits) else item for item in outputs]
        return tuple(items)
    return outputs


@functools.cache
def lazy_class(cls: type[ModelOutput]) -> type[ModelOutput]:
    """Return a subclass of *cls* that computes deferred logits when they are read."""
    if issubclass(cls, _ReadsLazily):
        return cls
    name = f"Lazy{cls.__name__}"  # a name of its own: pytree registers classes by name
    return type(name, (_ReadsLazily, cls), {"__module__": __name__, "__doc__": cls.__doc__})


class _ReadsLazily:
    """Mixed in before a ModelOutput class."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if isinstance(value, DeferredLogits):
            return _computed(self, name, value)
        return value

    def __getitem__(self, key: Any) -> Any:
        outputs: Any = self
        if isinstance(key, int):
            key = list(outputs.keys())[key]
        value = super().__getitem__(key)  # type: ignore[misc]
        return _computed(self, key, value) if isinstance(value, DeferredLogits) else value

    def __reduce__(self) -> Any:
        outputs: Any = self
        plain = type(self).__mro__[2]  # this class, the mixin, then what they were made of
        return _rebuild, (plain, {key: outputs[key] for key in outputs.keys()})


def _computed(outputs: Any, key: str, value: DeferredLogits) -> Any:
    tensor = value.materialize("outputs.logits")
    outputs[key] = tensor
    return tensor


def _rebuild(cls: type[ModelOutput], values: dict[str, Any]) -> ModelOutput:
    return cls(**values)
