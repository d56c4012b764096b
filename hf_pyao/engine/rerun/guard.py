"""Guards: does a first run leave something behind in modules that a second run would find?

[Note: Guards]
What a layer holds is not put back for a second run, other than its buffers: a layer that finds an
old attribute beside what it has done elsewhere may do that twice. So a guard looks at the modules
before and after every first run. If that has changed something, the call does not run again: its
tensors are kept or moved, as nothing depends on a second run yet. The first time may be a cache
that is filled at first use; the second time is final for the layer. Seen are

- an attribute that holds another object, or another number;
- what lists, dictionaries, sets, tuples, deques, small arrays, objects of a user's own, modules
  that are not registered, and the object behind a bound method hold; in containers one level more;
- a tensor among these that was written in place;
- hooks on modules and parameters that came or went;
- generators of random numbers and iterators, which have a position of their own.

A tensor with a graph that is bound to an attribute is a result of the call and no state. Not seen
are globals, class attributes, what functions close over, objects of torch and of engines, what lies
deeper, and what changes between the two runs. Of these, fingerprints see what changes a saved
tensor (``recompute.verification``).
"""

from __future__ import annotations

import functools
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from hf_pyao.engine.rerun.versions import version_of

_OF_TORCH = tuple(vars(nn.Module()))
"""Attributes of torch's own, which come first in each module."""
_NUM = len(_OF_TORCH)
_NUMBERS = frozenset({int, float, complex, bool, str, bytes, torch.Size})
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_ENGINES = frozenset({"torch", "hf_pyao", "accelerate", "deepspeed", "bitsandbytes", "triton"})
"""Packages whose objects hold what is no state of a forward: hooks, handles of sharded weights."""
_MOST_ITEMS = 256
_MOST_ARRAY_BYTES = 4096
_HOOKS = operator.itemgetter(
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
)
_CHILDREN = operator.itemgetter("_modules")
_HOOKS_OF_PARAMETER = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_NO_HOOKS = (None, None)
_ABSENT = object()
_Known = TypeVar("_Known")


class Look(NamedTuple):
    """What modules hold at a moment."""

    attributes: list[dict[str, Any]]
    """A copy of each module's dictionary."""
    values: list[Any]
    """What these hold beside torch's own tables."""
    holders: list[Any]
    """Containers and objects among what the attributes hold."""
    items: list[Any]
    """What is in these."""
    sizes: list[int]
    """How many of :attr:`items` are in each of them."""
    tensors: list[Tensor]
    """Those among all of it, other than parameters and buffers."""
    versions: list[int]
    """Of these tensors, at that moment."""
    arrays: list[bytes]
    num_children: list[int]
    """How many sub-modules each module has."""
    hooks: list[Any]
    """How many there are on each module, and which on each parameter."""
    ours: list[tuple[int, str]]
    """Attributes that this package has put on modules: number of the module, and name."""


class _Places(NamedTuple):
    """Where there is more to look at among the values of attributes, by their types."""

    types: list[type]
    holders: list[int]
    tensors: list[int]
    arrays: list[int]
    unsteady: list[int]
    ours: list[tuple[int, str]]


class Guard:
    """Looks at what modules hold; see [Note: Guards]. It holds nothing of it itself.

    Threads may look at once.
    """

    def __init__(self) -> None:
        self._places = _Places([], [], [], [], [], [])

    def look(self, modules: Iterable[nn.Module], also: Iterable[object] = ()) -> Look:
        """Return what *modules*, and objects *also*, hold at the moment."""
        held = [vars(module) for module in modules]
        attributes = list(map(dict.copy, held))
        values = list(chain.from_iterable(map(_own, attributes)))
        kinds = list(map(type, values))
        places = self._places
        if kinds != places.types:
            places = self._places = _places_in(attributes, kinds)
        tensors = [values[at] for at in places.tensors]
        holders = [*{id(values[at]): values[at] for at in places.holders}.values(), *also]
        items, sizes = items_in(holders, tensors)
        parameters = [p for each in held for p in each["_parameters"].values() if p is not None]
        return Look(
            attributes,
            values,
            holders,
            items,
            sizes,
            tensors,
            list(map(version_of, tensors)),
            [_bytes_of(values[at]) for at in places.arrays],
            list(map(len, map(_CHILDREN, held))),
            [
                *map(len, chain.from_iterable(map(_HOOKS, held))),
                *_hooks_on(parameters),
            ],
            places.ours,
        )

    def reason_never(self, look: Look, names: Callable[[], Sequence[str]]) -> str:
        """Say why no call may run again, whatever it does; empty if there is no such reason."""
        if not self._places.unsteady and not any(map(_is_unsteady, set(map(type, look.items)))):
            return ""
        for at, attributes in enumerate(look.attributes):
            for key, value in islice(attributes.items(), _NUM, None):
                for each in (value, *items_in([value], [])[0]):
                    if _is_unsteady(type(each)) and not _is_shared(each):
                        kind = type(each).__name__
                        name = path_of(names, at, key)
                        return f"{name} is a {kind}, whose position cannot be put back"
        return ""


def _places_in(attributes: list[dict[str, Any]], kinds: list[type]) -> _Places:
    keys = [(at, key) for at, each in enumerate(attributes) for key in islice(each, _NUM, None)]
    return _Places(
        kinds,
        [
            number
            for number, ((_, key), kind) in enumerate(zip(keys, kinds, strict=True))
            if _reader_of(kind) is not None and not (key == "forward" or are_ours(key))
        ],
        [at for at, kind in enumerate(kinds) if _is_tensor(kind)],
        [at for at, kind in enumerate(kinds) if _is_array(kind)],
        [at for at, kind in enumerate(kinds) if _is_unsteady(kind)],
        [key for key, kind in zip(keys, kinds, strict=True) if _stays_on(kind)],
    )


def _stays_on(kind: type) -> bool:
    """Say whether it is of this package, and on a module for longer than a call."""
    return is_ours(kind) and kind.__module__ != "hf_pyao.model.patching.exchanged_forwards"


def change(before: Look, now: Look, names: Callable[[], Sequence[str]] = list) -> str:
    """Name what is not as it was, but for results; empty if all is.

    Args:
        before: a look.
        now: a later one, at the same modules.
        names: returns the names of these modules, for messages.
    """
    if not _are_same(before.values, now.values):
        for at, (then, after) in enumerate(zip(before.attributes, now.attributes, strict=True)):
            for key in dict.fromkeys((*then, *after)):
                old, new = then.get(key, _ABSENT), after.get(key, _ABSENT)
                if _is_same(old, new) or _is_result(old, new) or key == "training":
                    continue
                if not are_ours(key, old, new):
                    return path_of(names, at, key)
    if before.sizes != now.sizes or not (
        _are_same(before.items, now.items) or all(map(_is_same, before.items, now.items))
    ):
        return _changed_holder(before, now)
    if before.arrays != now.arrays:
        return "an array that it holds"
    if before.hooks != now.hooks:
        return "hooks on its modules or parameters"
    if before.num_children != now.num_children:
        return "its sub-modules"
    if list(map(version_of, before.tensors)) != before.versions:
        return "a tensor that it holds, in place"
    return ""


def _is_same(one: Any, other: Any) -> bool:
    """Compare by identity, and numbers by value."""
    if one is other:
        return True
    return type(one) is type(other) and type(one) in _NUMBERS and bool(one == other)


def _is_result(old: Any, new: Any) -> bool:
    """Say whether an attribute that held *old* has got a result of its call: *new* has a graph."""
    if not isinstance(new, Tensor) or new.grad_fn is None:
        return False
    return old is None or old is _ABSENT or (isinstance(old, Tensor) and old.grad_fn is not None)


def is_ours(value: Any) -> bool:
    """Say whether *value* is something that this package has put on a module."""
    of = getattr(value, "__module__", None) or type(value).__module__
    return isinstance(of, str) and of.startswith("hf_pyao.")


def are_ours(key: str, *values: Any) -> bool:
    """Say whether an attribute *key* that holds one of *values* is this package's."""
    return key.startswith("_pyao_") or any(map(is_ours, values))


def results_in(before: Look, now: Look) -> list[tuple[int, str]]:
    """Return which attributes have got results: the number of the module, and the name."""
    if _are_same(before.values, now.values):
        return []
    return [
        (at, key)
        for at, (then, after) in enumerate(zip(before.attributes, now.attributes, strict=True))
        for key, new in after.items()
        if (old := then.get(key, _ABSENT)) is not new and _is_result(old, new)
    ]


def _are_same(before: list[Any], now: list[Any]) -> bool:
    """Say whether two lists hold the very same objects; without a loop in Python."""
    return len(before) == len(now) and all(map(operator.is_, before, now))


def have_same(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> bool:
    """Say whether all tables hold the very same objects; without a loop in Python."""
    if list(map(len, before)) != list(map(len, now)):
        return False
    return all(
        map(
            operator.is_,
            chain.from_iterable(map(dict.values, before)),
            chain.from_iterable(map(dict.values, now)),
        )
    )


def _changed_holder(before: Look, now: Look) -> str:
    """Name an attribute whose container or object has changed."""
    gone = set(map(id, now.items)) - set(map(id, before.items))
    for attributes in now.attributes:
        for key, value in attributes.items():
            if key not in _OF_TORCH and gone.intersection(map(id, items_in([value], [])[0])):
                return f"what {key!r} holds"
    return "what a container or an object holds"


def _own(attributes: dict[str, Any]) -> Iterable[Any]:
    """Return what *attributes* of a module hold beside torch's own."""
    return islice(attributes.values(), _NUM, None)


def items_in(holders: Iterable[object], tensors: list[Tensor]) -> tuple[list[Any], list[int]]:
    """Return what containers and objects hold, and how much each; tensors go to *tensors*, too.

    What is in a container is looked into once more.
    """
    found: list[Any] = []
    sizes: list[int] = []
    pending = [(holder, True) for holder in holders]
    for holder, is_outer in pending:
        reader = _reader_of(type(holder))
        items = [] if reader is None else list(islice(reader(holder), _MOST_ITEMS + 1))
        is_container = _is_container(type(holder))
        sizes.append(len(holder) if is_container else len(items))  # type: ignore[arg-type]
        if len(items) > _MOST_ITEMS:
            continue
        found += items
        kinds = set(map(type, items))
        if any(map(_is_tensor, kinds)):
            tensors += [each for each in items if isinstance(each, Tensor)]
        if is_outer and is_container and any(map(_reader_of, kinds)):
            pending += [(each, False) for each in items if _reader_of(type(each)) is not None]
    return found, sizes


def is_looked_into(value: object) -> bool:
    """Say whether a guard looks at what *value* holds; a module that is given does not count."""
    return not isinstance(value, nn.Module) and _reader_of(type(value)) is not None


def _by_type(function: Callable[[Any], _Known]) -> Callable[[Any], _Known]:
    """Ask *function* once for each type."""
    return functools.cache(function)


@_by_type
def _reader_of(kind: Any) -> Callable[[Any], Iterable[Any]] | None:
    """Return how what an object of *kind* holds is read; None: it is not looked into."""
    if kind in _NUMBERS or issubclass(kind, Tensor | type):
        return None
    if issubclass(kind, dict):
        return dict.values
    if issubclass(kind, _CONTAINERS):
        return iter
    if issubclass(kind, types.MethodType):
        return _behind_method
    if issubclass(kind, nn.Module):
        return _in_module
    package = kind.__module__.partition(".")[0]
    is_library = package in _ENGINES or package in sys.stdlib_module_names
    if not kind.__dictoffset__ or (is_library and kind is not types.SimpleNamespace):
        return None
    return _in_object


def _in_object(value: Any) -> Iterable[Any]:
    # Not by `vars`: configurations of transformers look at each attribute that is asked for.
    attributes: dict[str, Any] = object.__getattribute__(value, "__dict__")
    return attributes.values()


def _in_module(module: nn.Module) -> Iterable[Any]:
    return chain(_own(vars(module)), module._buffers.values())


def _behind_method(method: types.MethodType) -> Iterable[Any]:
    return items_in([method.__self__], [])[0]


@_by_type
def _is_container(kind: Any) -> bool:
    """Say so; `isinstance` would ask an object that is none for its class."""
    return issubclass(kind, _CONTAINERS)


@_by_type
def _is_tensor(kind: Any) -> bool:
    return issubclass(kind, Tensor) and not issubclass(kind, Parameter)


@_by_type
def _is_array(kind: Any) -> bool:
    return hasattr(kind, "tobytes") or issubclass(kind, bytearray)


def _bytes_of(array: Any) -> bytes:
    """Return what an array holds, if it is small."""
    if isinstance(array, bytearray):
        return bytes(array[:_MOST_ARRAY_BYTES])
    is_large = getattr(array, "size", 1) * array.itemsize > _MOST_ARRAY_BYTES
    return b"" if is_large else bytes(array.tobytes())


@_by_type
def is_generator(kind: Any) -> bool:
    """Say whether objects of *kind* are generators of random numbers."""
    if kind.__module__.startswith("numpy.random"):
        return kind.__name__ in ("Generator", "RandomState")
    return issubclass(kind, torch.Generator | random.Random)


@_by_type
def _is_unsteady(kind: Any) -> bool:
    """Say whether objects of *kind* have a position: generators, and iterators."""
    is_iterator = kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")
    return is_iterator or is_generator(kind)


def _is_shared(generator: Any) -> bool:
    """Say whether *generator* is one of those that are put back for each second run."""
    numpy: Any = sys.modules.get("numpy.random")
    shared = [torch.default_generator, getattr(random.random, "__self__", None)]
    shared += [] if numpy is None else [numpy.mtrand._rand, numpy.get_state.__self__]
    return any(generator is each for each in shared)


def _hooks_on(parameters: list[Parameter]) -> list[Any]:
    """Return the numbers of the hooks on each parameter that has any, behind its own number."""
    tables = list(map(_HOOKS_OF_PARAMETER, parameters))
    if tables.count(_NO_HOOKS) == len(tables):
        return []
    return [
        (at, *chain.from_iterable(filter(None, both)))
        for at, both in enumerate(tables)
        if any(both)
    ]


def path_of(names: Callable[[], Sequence[str]], at: int, key: str) -> str:
    """Return the name of attribute *key* of the module with number *at*, in quotes."""
    return repr(".".join(filter(None, (*names()[at : at + 1], key))))
