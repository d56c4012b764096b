"""Kinds of values that a module or an argument may hold, and how each is noted and put back."""

from __future__ import annotations

import enum
import operator
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from hf_pyao.engine.rerun.generators import generator_kinds

_ENGINES = frozenset({"torch", "hf_pyao", "accelerate", "deepspeed", "bitsandbytes", "triton"})
"""Packages whose objects hold what is no state of a forward: hooks, handles of sharded weights."""


class Kind(enum.IntEnum):
    """What a value is, for an inventory."""

    LEAF = 0
    """Nothing inside of it changes, or nothing that counts: it is known by its identity."""
    TENSOR = 1
    PARAMETER = 2
    MODULE = 3
    GENERATOR = 4
    CONTAINER = 5
    """It is put back by its :class:`Content`."""
    TUPLE = 6
    OBJECT = 7
    """Its attributes are in a dictionary."""
    OPAQUE = 8
    """Its position cannot be read, nor put back: an iterator."""


class Kinds(dict[type, Kind]):
    """Kinds by type; each type is looked at once."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = generator_kinds()
        self._contents: dict[type, Content] = {}

    def content(self, cls: type) -> Content:
        """Return how a container of *cls* is noted."""
        content = self._contents.get(cls)
        if content is None:
            found = content_of(cls)
            assert found is not None
            content = self._contents[cls] = found
        return content

    def __missing__(self, cls: type) -> Kind:
        """Look at a type that was not seen before."""
        if cls.__module__.partition(".")[0] == "numpy":
            self.generators = generator_kinds()  # numpy has come since
        kind = self[cls] = self._kind_of(cls)
        return kind

    def _kind_of(self, cls: type) -> Kind:
        if issubclass(cls, Parameter):
            return Kind.PARAMETER
        if issubclass(cls, Tensor):
            return Kind.TENSOR if cls is Tensor else Kind.LEAF
        if issubclass(cls, nn.Module):
            return Kind.MODULE
        if cls in self.generators:
            return Kind.GENERATOR
        if content_of(cls) is not None:
            return Kind.CONTAINER
        if issubclass(cls, tuple):
            return Kind.LEAF if issubclass(cls, torch.Size) else Kind.TUPLE
        return _kind_of_object(cls)


def _kind_of_object(cls: type) -> Kind:
    package = cls.__module__.partition(".")[0]
    if package in ("builtins", "itertools") and hasattr(cls, "__next__"):
        return Kind.OPAQUE
    if issubclass(cls, type | enum.Enum | BaseException | types.ModuleType):
        return Kind.LEAF
    return Kind.OBJECT if _is_data(cls) and cls.__dictoffset__ else Kind.LEAF


def _is_data(cls: type) -> bool:
    """Say whether objects of *cls* are a user's own, and not the machinery of a library."""
    package = cls.__module__.partition(".")[0]
    if cls is types.SimpleNamespace or package == "collections":
        return True
    return package not in _ENGINES and package not in sys.stdlib_module_names


class Content(NamedTuple):
    """How what a container holds is read and written; all of it at once."""

    copy: Callable[[Any], Any]
    """Returns the content, as something that does not change."""
    same: Callable[[Any, Any], bool]
    """Compares the container with a copy, items by identity."""
    put: Callable[[Any, Any], None]
    """Has the container hold what a copy does."""
    items: Callable[[Any], Any]
    """Returns the items in a copy."""
    is_counted: bool = True
    """Whether it has a number of items, and may be empty."""


def content_of(cls: type) -> Content | None:
    """Return how containers of *cls* are noted; None: it is no container that is known."""
    for base, content in _CONTENTS:
        if issubclass(cls, base):
            return content
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and issubclass(cls, numpy.ndarray):
        return _ARRAY
    is_slotted = not cls.__dictoffset__ and any("__slots__" in vars(c) for c in cls.__mro__)
    if is_slotted and _is_data(cls) and not issubclass(cls, tuple | nn.Module | enum.Enum):
        return _SLOTS
    return None


def _same_dict(now: dict[Any, Any], noted: dict[Any, Any]) -> bool:
    if len(now) != len(noted):
        return False
    has_same_values = all(map(operator.is_, now.values(), noted.values()))
    return has_same_values and all(map(operator.is_, now, noted))


def _put_dict(now: dict[Any, Any], noted: dict[Any, Any]) -> None:
    """Change as little as can be: other threads may read what stays."""
    for key in now.keys() - noted.keys():
        dict.__delitem__(now, key)
    for key, value in noted.items():
        if key not in now or now[key] is not value:
            dict.__setitem__(now, key, value)
    if not all(map(operator.is_, now, noted)):  # the order has changed
        dict.clear(now)
        dict.update(now, noted)


def _put_ordered(now: OrderedDict[Any, Any], noted: dict[Any, Any]) -> None:
    if not _same_dict(now, noted):
        OrderedDict.clear(now)
        for key, value in noted.items():
            OrderedDict.__setitem__(now, key, value)


def _same_items(now: Any, noted: Any) -> bool:
    return len(now) == len(noted) and all(map(operator.is_, now, noted))


def _put_list(now: list[Any], noted: list[Any]) -> None:
    list.__setitem__(now, slice(None), noted)


def _same_set(now: set[Any], noted: set[Any]) -> bool:
    return now == noted


def _put_set(now: set[Any], noted: set[Any]) -> None:
    now.intersection_update(noted)
    now.update(noted)


def _put_deque(now: deque[Any], noted: list[Any]) -> None:
    now.clear()
    now.extend(noted)


def _put_array(now: Any, noted: Any) -> None:
    now[...] = noted


def _put_bytes(now: bytearray, noted: bytes) -> None:
    now[:] = noted


def _no_items(noted: Any) -> tuple[()]:
    return ()


def _values(noted: dict[Any, Any]) -> Any:
    return noted.values()


def _same_bytes(now: Any, noted: Any) -> bool:
    return bytes(now) == bytes(noted)


def _slots_of(value: Any) -> dict[str, Any]:
    names = (name for cls in type(value).__mro__ for name in _names(vars(cls).get("__slots__", ())))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _names(slots: Any) -> Any:
    return (slots,) if isinstance(slots, str) else slots


def _same_slots(now: Any, noted: dict[str, Any]) -> bool:
    return _same_dict(_slots_of(now), noted)


def _put_slots(now: Any, noted: dict[str, Any]) -> None:
    for name in _slots_of(now).keys() - noted.keys():
        object.__delattr__(now, name)
    for name, value in noted.items():
        object.__setattr__(now, name, value)


_SLOTS = Content(_slots_of, _same_slots, _put_slots, _values, False)
DICT = Content(dict.copy, _same_dict, _put_dict, _values)
"""Of plain dictionaries, such as those of attributes."""
_ARRAY = Content(
    lambda array: array.copy(),
    lambda a, b: a.tobytes() == b.tobytes(),
    _put_array,
    _no_items,
    False,
)
_CONTENTS: tuple[tuple[type, Content], ...] = (
    (OrderedDict, Content(dict.copy, _same_dict, _put_ordered, _values)),
    (dict, DICT),
    (list, Content(list.copy, _same_items, _put_list, iter)),
    (set, Content(set.copy, _same_set, _put_set, iter)),
    (deque, Content(list, _same_items, _put_deque, iter)),
    (bytearray, Content(bytes, _same_bytes, _put_bytes, _no_items, False)),
)
