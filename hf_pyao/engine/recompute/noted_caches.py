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
held. Of the entries of other layers the shapes alone are known, or all keys and values would stay
on the device until backward, also where the caller lets the cache go. A tensor on ``meta`` takes
the place of each: its shape can be asked for, and computing with it is an error. A layer that
replaces no entry reads those of other layers (models that share keys and values between layers),
and all are held for it.

Caches of other classes may write in place. A layer that gets one does not run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

    def again(self) -> Tensor:
        """Return the tensor for a second run."""
        return self.tensor.detach().requires_grad_() if self.requires_grad else self.tensor


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
    if type(value) in (Tensor, tuple, bool, int):  # the commonest arguments: Mapping is slow
        return False
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
        self._attributes: dict[str, Any] = {}
        self._lists: list[tuple[list[Any], list[_NotedEntry]]] = []
        """Entries, one for each layer of the model, and what is noted of them; also of caches in
        it."""
        for name, value in vars(cache).items():
            noted = dict(value) if isinstance(value, dict) else value
            if is_known_cache(value):
                noted = NotedCache(value)
                self._lists += noted._lists
                noted._lists = []
            elif isinstance(value, list):
                noted = [_NotedEntry(each) for each in value]
                self._lists.append((value, noted))
            self._attributes[name] = noted

    def forward_ended(self) -> None:
        """Hold what the call has read; of other entries, know the shape."""
        read = {
            index
            for entries, noted in self._lists
            for index, entry in enumerate(entries)
            if index >= len(noted) or noted[index].is_another(entry)
        }
        self._lists = [([], noted) for _, noted in self._lists]
        for _, noted in self._lists:
            for index, each in enumerate(noted):
                each.settle(is_read=not read or index in read)

    def again(self) -> Any:
        """Return a copy of the cache for a second run."""
        attributes = dict(self._attributes)
        for name, value in attributes.items():
            if isinstance(value, NotedCache):
                attributes[name] = value.again()
            elif isinstance(value, list):
                attributes[name] = [each.again() for each in value]
            elif isinstance(value, dict):
                attributes[name] = dict(value)
        return _copy_of(self._kind, attributes)

    def held(self) -> Iterator[Held]:
        """Yield what it holds."""
        for _, noted in self._lists:
            for entry in noted:
                yield from (each for each in entry.attributes.values() if isinstance(each, Held))


class _Unread(NamedTuple):
    """Stands for a tensor that the call has not read."""

    shape: torch.Size
    dtype: torch.dtype


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
        """Hold its tensors, or know their shapes alone."""
        for name, version in self._versions.items():
            tensor = self.attributes[name]
            known = hold(tensor, version) if is_read else _Unread(tensor.shape, tensor.dtype)
            self.attributes[name] = known

    def again(self) -> Any:
        """Return a copy of it for a second run."""
        attributes = dict(self.attributes)
        for name, value in attributes.items():
            if isinstance(value, _Unread):
                attributes[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            elif isinstance(value, Held):
                attributes[name] = value.again()
        return _copy_of(self._kind, attributes)


def _copy_of(kind: type[Any], attributes: dict[str, Any]) -> Any:
    found: Any = object.__new__(kind)
    found.__dict__.update(attributes)
    return found


def _is_of(value: Any, names: frozenset[str]) -> bool:
    kind = type(value)
    return kind.__module__ == _MODULE and kind.__name__ in names
