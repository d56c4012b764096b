"""Model outputs whose logits are computed when they are read.

A model's output holds :class:`DeferredLogits` after a training forward. Code that reads it by name
or place (``outputs.logits``, ``outputs["logits"]``, ``outputs[1]``) gets a tensor. Code that walks
through all of it (DDP, FSDP, DeepSpeed, ``accelerate``'s casting) gets the stand-in, and computes
nothing.

[Note: Names from the output] A walk asks the output for its names, by its keys or its dataclass
fields, and reads each of them: ``outputs[key]``, ``getattr(outputs, field.name)``. Such a read
differs from a user's only in where the name comes from. So the names that these outputs return are
marked, and a read by a marked name returns what is stored. Marked names are strings, equal to plain
strings of the same letters.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, KeysView
from typing import Any

from transformers.utils.generic import ModelOutput

from hf_pyao.model.head.deferred import DeferredLogits


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


class _GivenName(str):
    """A field's name as the output itself gives it; see [Note: Names from the output]."""

    def __reduce__(self) -> Any:
        return str, (str(self),)


@functools.cache
def lazy_class(cls: type[ModelOutput]) -> type[ModelOutput]:
    """Return a subclass of *cls* that computes deferred logits when they are read."""
    if issubclass(cls, _ReadsLazily):
        return cls
    given = {}
    for name, field in cls.__dataclass_fields__.items():  # type: ignore[attr-defined]
        given[name] = copy.copy(field)
        given[name].name = _GivenName(name)
    attributes = {"__module__": __name__, "__doc__": cls.__doc__, "__dataclass_fields__": given}
    # A name of its own: pytree registers classes by name.
    return type(f"Lazy{cls.__name__}", (_ReadsLazily, cls), attributes)


class _ReadsLazily:
    """Mixed in before a ModelOutput class; see [Note: Names from the output]."""

    def __iter__(self) -> Iterator[str]:
        names: Iterator[str] = super().__iter__()  # type: ignore[misc]
        return map(_GivenName, names)

    def keys(self) -> KeysView[str]:
        """Return the names of what is not None."""
        mapping: Any = self
        return KeysView(mapping)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if isinstance(value, DeferredLogits) and not isinstance(name, _GivenName):
            return _computed(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(str(name), value)

    def __getitem__(self, key: Any) -> Any:
        outputs: Any = self
        if isinstance(key, slice):
            return tuple(outputs[str(name)] for name in list(outputs)[key])
        if not isinstance(key, str):
            key = str(list(outputs)[key])
        value = super().__getitem__(key)  # type: ignore[misc]
        if isinstance(value, DeferredLogits) and not isinstance(key, _GivenName):
            return _computed(self, key, value)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return what is stored by this name, computed; *default* if nothing is."""
        outputs: Any = self
        return outputs[key] if key in outputs else default

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(str(key), value)  # type: ignore[misc]

    def to_tuple(self) -> tuple[Any, ...]:
        """Return all that is not None; the logits are computed."""
        outputs: Any = self
        return tuple(outputs[str(name)] for name in outputs)

    def __reduce__(self) -> Any:
        outputs: Any = self
        plain = type(self).__mro__[2]  # this class, the mixin, then what they were made of
        return _rebuild, (plain, {str(name): outputs[str(name)] for name in outputs})


def _computed(outputs: Any, key: str, value: DeferredLogits) -> Any:
    tensor = value.materialize("outputs.logits")
    outputs[key] = tensor
    return tensor


def _rebuild(cls: type[ModelOutput], values: dict[str, Any]) -> ModelOutput:
    return cls(**values)
