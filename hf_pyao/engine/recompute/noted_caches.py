"""Caches of keys and values that a layer gets, noted so that the layer can run again.

[Note: Caches]
A model outside of a Trainer makes a cache by default (``use_cache=True``), and its layers append
their keys and values to it. A second run must find the cache as the first one did: keys and values
that are concatenated with an empty cache have other strides than without, and kernels sum them in
another order. It must not change the cache either, since the caller may go on with it.

So the second run gets a copy of the cache objects, with the tensors that the first run found.
transformers' dynamic caches never write a tensor in place: they replace it. What a call found is
therefore intact when its second run asks for it, if something holds it. A layer reads and replaces
its own entry of a cache (in an encoder-decoder, of two caches at the same index): these tensors are
held. The entries of other layers are referred to weakly, or all keys and values would stay on the
device until backward, also where the caller lets the cache go. Once they are gone, a tensor on
``meta`` takes their place: its shape can be asked for, and computing with it is an error. A layer
that replaces no entry reads those of other layers (models that share keys and values between
layers), and all are held for it.

Caches of other classes may write in place. A layer that gets one does not run again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_pyao.engine.rerun.versions import version_of

_MODULE = "transformers.cache_utils"
_CACHES = frozenset({"DynamicCache", "EncoderDecoderCache"})
_ENTRIES = frozenset(
    {"DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer"}
)
"""Classes that replace their tensors and never write to them."""


class Held(NamedTuple):
    """Stands for a tensor that is held as it is."""

    tensor: Tensor
    version: int
    requires_grad: bool
    """Whether it is to require a gradient again, though nothing made it."""


def hold(tensor: Tensor, version: int | None = None) -> Held:
    """Return what stands for *tensor*, without what made it.

    Args:
        tensor: what is held.
        version: its version when it was seen; None: now.
    """
    version = version_of(tensor) if version is None else version
    if tensor.grad_fn is None:
        return Held(tensor, version, False)
    return Held(tensor.detach(), version, True)


def looks_like_cache(value: Any) -> bool:
    """Say whether *value* is an object that layers update."""
    if value is None or isinstance(value, Tensor | Mapping | set | str | int | float):
        return False
    return callable(getattr(value, "update", None))


def why_not_noted(value: Any) -> str:
    """Say why a cache cannot be noted; empty if it can, or if *value* is no cache."""
    if not looks_like_cache(value):
        return ""
    if not is_known_cache(value):
        return f"is a {type(value).__name__}, which may write its tensors in place"
    for attribute in vars(value).values():
        if is_known_cache(attribute) and (why := why_not_noted(attribute)):
            return why
        if isinstance(attribute, list):
            for entry in attribute:
                if not _is_of(entry, _ENTRIES):
                    kind = type(entry).__name__
                    return f"has a {kind}, which may write its tensors in place"
    if getattr(value, "offloading", False):
        return "moves its tensors between devices itself"
    return ""


def is_known_cache(value: Any) -> bool:
    """Say whether *value* is a cache that replaces its tensors, and never writes to them."""
    return _is_of(value, _CACHES)


class NotedCache:
    """Stands for a cache as a layer call finds it: see [Note: Caches].

    Args:
        cache: one for which :func:`why_not_noted` is empty.
    """

    def __init__(self, cache: Any) -> None:
        self._kind = type(cache)
        self._attributes = {name: _noted(value) for name, value in vars(cache).items()}

    def forward_ended(self) -> None:
        """Hold what the call has read; of other entries, refer to what is there."""
        entries = list(self._entries())
        read = {index for each in entries for index in each.changed()}
        for each in entries:
            each.settle(read)

    def refilled(self, filled: Callable[[Held], Tensor]) -> Any:
        """Return a copy of the cache; *filled* returns the tensor for what is held."""
        return _copy_of(
            self._kind, {name: _refilled(v, filled) for name, v in self._attributes.items()}
        )

    def held(self) -> Iterator[Held]:
        """Yield what it holds."""
        for entries in self._entries():
            yield from entries.held()

    def _entries(self) -> Iterator[_NotedEntries]:
        for value in self._attributes.values():
            if isinstance(value, NotedCache):
                yield from value._entries()
            elif isinstance(value, _NotedEntries):
                yield value


class _NotedEntries:
    """The entries of a cache, one for each layer of the model."""

    def __init__(self, entries: list[Any]) -> None:
        self._origin: list[Any] = entries
        self._entries = [_NotedEntry(each) for each in entries]

    def changed(self) -> Iterator[int]:
        """Yield the indices of entries that are new, or that have other tensors than before."""
        for index, origin in enumerate(self._origin):
            if index >= len(self._entries) or self._entries[index].is_another(origin):
                yield index

    def settle(self, read: set[int]) -> None:
        """Hold the tensors of the entries that were *read*, of all if that is empty."""
        self._origin = []
        for index, entry in enumerate(self._entries):
            entry.settle(is_read=not read or index in read)

    def held(self) -> Iterator[Held]:
        """Yield what they hold."""
        for entry in self._entries:
            yield from (each for each in entry.attributes.values() if isinstance(each, Held))

    def refilled(self, filled: Callable[[Held], Tensor]) -> list[Any]:
        """Return copies of them."""
        return [each.refilled(filled) for each in self._entries]


class _NotedEntry:
    """What a cache has for one layer."""

    def __init__(self, entry: Any) -> None:
        self._kind = type(entry)
        self.attributes = dict(vars(entry))
        self._versions = {
            name: version_of(value)
            for name, value in self.attributes.items()
            if isinstance(value, Tensor)
        }

    def is_another(self, entry: Any) -> bool:
        """Say whether *entry* has other attributes than were noted."""
        now, before = vars(entry), self.attributes
        return now.keys() != before.keys() or any(now[name] is not before[name] for name in now)

    def settle(self, *, is_read: bool) -> None:
        """Hold its tensors, or refer to them."""
        for name, version in self._versions.items():
            tensor = self.attributes[name]
            self.attributes[name] = hold(tensor, version) if is_read else _Unread(tensor, version)

    def refilled(self, filled: Callable[[Held], Tensor]) -> Any:
        """Return a copy of it."""
        attributes = dict(self.attributes)
        for name in self._versions:
            value = attributes[name]
            attributes[name] = value.tensor(filled) if isinstance(value, _Unread) else filled(value)
        return _copy_of(self._kind, attributes)


class _Unread:
    """Refers to a tensor, and knows its shape when it is gone."""

    def __init__(self, tensor: Tensor, version: int) -> None:
        self._ref = weakref.ref(tensor)
        self._version = version
        self._shape, self._dtype = tensor.shape, tensor.dtype

    def tensor(self, filled: Callable[[Held], Tensor]) -> Tensor:
        """Return the tensor if it is as it was; one on ``meta`` if not."""
        tensor = self._ref()
        if tensor is None or version_of(tensor) != self._version:
            return torch.empty(self._shape, dtype=self._dtype, device="meta")
        return filled(hold(tensor))


def _noted(value: Any) -> Any:
    if is_known_cache(value):
        return NotedCache(value)
    if isinstance(value, list):
        return _NotedEntries(value)
    return dict(value) if isinstance(value, dict) else value


def _refilled(value: Any, filled: Callable[[Held], Tensor]) -> Any:
    if isinstance(value, NotedCache | _NotedEntries):
        return value.refilled(filled)
    return dict(value) if isinstance(value, dict) else value


def _copy_of(kind: type[Any], attributes: dict[str, Any]) -> Any:
    found: Any = object.__new__(kind)
    found.__dict__.update(attributes)
    return found


def _is_of(value: Any, names: frozenset[str]) -> bool:
    kind = type(value)
    return kind.__module__ == _MODULE and kind.__name__ in names
