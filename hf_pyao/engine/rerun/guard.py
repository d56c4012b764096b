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
- sub-modules, and hooks on modules and parameters, that came or went;
- generators of random numbers and iterators, which have a position of their own.

Not seen are globals, class attributes, what functions close over, objects of torch and of engines,
what lies deeper, and what changes between the two runs. Of these, fingerprints see what changes a
saved tensor (``recompute.verification``).
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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from hf_pyao.engine.rerun.versions import version_of

_NUM_OF_TORCH = len(vars(nn.Module()))
"""Attributes of torch's own, which come first in each module."""
_NUMBERS = frozenset({int, float, complex, bool, str, bytes, torch.Size})
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_ENGINES = frozenset({"torch", "hf_pyao", "accelerate", "deepspeed", "bitsandbytes", "triton"})
"""Packages whose objects hold what is no state of a forward: hooks, handles of sharded weights."""
_COUNTERS_OF_DEEPSPEED = frozenset({"applied_pre_backward_ref_cnt", "ds_grads_remaining"})
"""Attributes in which hooks of ZeRO-3 count the backwards that a module has still to see."""
_MOST_ITEMS = 256
_MOST_ARRAY_BYTES = 4096
_COUNTED = operator.itemgetter(
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_modules", "_parameters"),
)
_HOOKS = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_ABSENT = object()
Place = tuple[int, str]
"""The number of a module, and the name of an attribute of it."""


class Look(NamedTuple):
    """What modules hold at a moment.

    Attributes:
        attributes: a copy of each module's dictionary.
        facts: what containers, objects and arrays hold, by number of the module and attribute.
        tensors: those in attributes and in what these hold, other than parameters and buffers.
        versions: of these tensors, at that moment.
        unsteady: generators and iterators, and the places of the attributes that they are in.
        counts: how many hooks, sub-modules and parameters each module has; which hooks parameters
            have.
    """

    attributes: list[dict[str, Any]]
    facts: dict[Place, list[Any]]
    tensors: list[Tensor]
    versions: list[int]
    unsteady: list[tuple[Place, Any]]
    counts: list[Any]

    def reason_unsteady(self, names: Callable[[], Sequence[str]]) -> str:
        """Say why nothing may run again that holds this, whatever it does; or return nothing."""
        for place, value in self.unsteady:
            kind = type(value).__name__
            return f"{path_of(names, *place)} holds a {kind}, which cannot be put back"
        return ""


def look_at(modules: Iterable[dict[str, Any]]) -> Look:
    """Return what modules with these dictionaries hold at the moment."""
    found = Look(list(map(dict.copy, modules)), {}, [], [], [], [])
    seen: set[int] = set()
    for at, each in enumerate(found.attributes):
        for key, value in islice(each.items(), _NUM_OF_TORCH, None):
            kind = kind_of(type(value))
            if kind is not None and key != "forward" and not key.startswith("_pyao_"):
                if id(value) not in seen:
                    seen.add(id(value))
                    _read([value], found, (at, key), num_levels=2)
    found.versions.extend(map(version_of, found.tensors))
    found.counts.extend(map(len, chain.from_iterable(map(_COUNTED, found.attributes))))
    for each in found.attributes:
        for name, parameter in each["_parameters"].items():
            if parameter is not None and any(tables := _HOOKS(parameter)):
                found.counts.append((name, *chain.from_iterable(filter(None, tables))))
    return found


def change(before: Look, now: Look, names: Callable[[], Sequence[str]]) -> str:
    """Name what is not as it was; empty if all is.

    Args:
        before: a look.
        now: a later one, at the same modules.
        names: returns the names of these modules, for messages.
    """
    if not have_same(before.attributes, now.attributes):
        for at, (then, after) in enumerate(zip(before.attributes, now.attributes, strict=True)):
            for key in dict.fromkeys((*then, *after)):
                old, new = then.get(key, _ABSENT), after.get(key, _ABSENT)
                is_passed_over = key == "training" or key in _COUNTERS_OF_DEEPSPEED
                if not (is_passed_over or _is_same(old, new) or are_ours(key, old, new)):
                    return path_of(names, at, key)
    for place, facts in before.facts.items():
        if not _are_same(facts, now.facts.get(place, [])):
            return f"what {path_of(names, *place)} holds"
    if before.counts != now.counts:
        return "hooks on its modules or parameters, or which of these it has"
    if list(map(version_of, before.tensors)) != before.versions:
        return "a tensor that it holds, in place"
    return ""


def _is_same(one: Any, other: Any) -> bool:
    """Compare by identity, and numbers by value."""
    if one is other:
        return True
    return type(one) is type(other) and type(one) in _NUMBERS and bool(one == other)


def _are_same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and (
        all(map(operator.is_, before, now)) or all(map(_is_same, before, now))
    )


def have_same(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> bool:
    """Say whether all tables hold the very same objects; without a loop in Python."""
    one, other = (chain.from_iterable(map(dict.values, each)) for each in (before, now))
    return list(map(len, before)) == list(map(len, now)) and all(map(operator.is_, one, other))


def are_ours(key: str, *values: Any) -> bool:
    """Say whether this package has put an attribute *key*, or one of its *values*, on a module."""
    homes = (getattr(value, "__module__", None) or type(value).__module__ for value in values)
    return key.startswith("_pyao_") or any(str(home).startswith("hf_pyao.") for home in homes)


def path_of(names: Callable[[], Sequence[str]], at: int, key: str) -> str:
    """Return the name of attribute *key* of the module with number *at*, in quotes."""
    return repr(".".join(filter(None, (*names()[at : at + 1], key))))


# ---- what is in a value --------------------------------------------------------------------------


def _read(values: Iterable[Any], found: Look, place: Place, *, num_levels: int) -> None:
    """Add to *found* what is in *values*, and in what that holds if these are containers."""
    for value in values:
        kind = kind_of(type(value))
        if kind is _TENSOR:
            found.tensors.append(value)
        elif kind is _UNSTEADY:
            found.unsteady.append((place, value))
        elif kind is _ARRAY:
            found.facts.setdefault(place, []).append(_bytes_of(value))
        elif kind is not None and num_levels:
            items = list(kind(value))
            facts = found.facts.setdefault(place, [])
            facts.append(len(items))
            if len(items) <= _MOST_ITEMS:
                facts.extend(items)
                inside = [each for each in items if kind_of(type(each)) is not None]
                levels = num_levels - 1 if kind in _OF_CONTAINERS else 0
                _read(inside, found, place, num_levels=levels)


def _in_object(value: Any) -> Iterable[Any]:
    # Not by `vars`: configurations of transformers look at each attribute that is asked for.
    attributes: dict[str, Any] = object.__getattribute__(value, "__dict__")
    return attributes.values()


def _in_module(module: nn.Module) -> Iterable[Any]:
    own = islice(vars(module).values(), _NUM_OF_TORCH, None)
    return (*own, *module._buffers.values())


def _behind_method(method: types.MethodType) -> Iterable[Any]:
    reader = kind_of(type(method.__self__))
    return () if reader is None else reader(method.__self__)


def _nothing(_: object) -> Iterable[Any]:
    return ()


_TENSOR, _ARRAY, _UNSTEADY = (functools.partial(_nothing) for _ in range(3))
"""Kinds that are not read item by item."""
_OF_CONTAINERS = (dict.values, iter)
Reader = Callable[[Any], Iterable[Any]]
"""Returns what a value holds."""


def _kind_of(of: Any) -> Reader | None:
    """Return how a guard reads an object of this type; None: it is not looked into."""
    if of in _NUMBERS or issubclass(of, type | Parameter):
        return None
    if issubclass(of, Tensor):
        return _TENSOR
    if issubclass(of, dict):
        return dict.values
    if issubclass(of, _CONTAINERS):
        return iter
    if hasattr(of, "tobytes") or issubclass(of, bytearray):
        return _ARRAY
    is_iterator = of.__module__ in ("builtins", "itertools") and hasattr(of, "__next__")
    is_generator = issubclass(of, torch.Generator | random.Random)
    if is_iterator or is_generator or of.__module__.startswith("numpy.random"):
        return _UNSTEADY
    if issubclass(of, types.MethodType):
        return _behind_method
    if issubclass(of, nn.Module):
        return _in_module
    package = of.__module__.partition(".")[0]
    is_library = package in _ENGINES or package in sys.stdlib_module_names
    if not of.__dictoffset__ or (is_library and of is not types.SimpleNamespace):
        return None
    return _in_object


kind_of: Callable[[Any], Reader | None] = functools.cache(_kind_of)
"""Asks once for each type."""


def is_looked_into(value: object) -> bool:
    """Say whether a guard looks at what *value* holds; a module that is given does not count."""
    return not isinstance(value, nn.Module | Tensor) and kind_of(type(value)) is not None


def _bytes_of(array: Any) -> bytes:
    """Return what an array holds, if it is small."""
    if isinstance(array, bytearray):
        return bytes(array[:_MOST_ARRAY_BYTES])
    is_large = getattr(array, "size", 1) * array.itemsize > _MOST_ARRAY_BYTES
    return b"" if is_large else bytes(array.tobytes())
