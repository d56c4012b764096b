"""What an inventory holds of the values that it finds, and how it tells and exchanges them."""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.nn import Parameter

from hf_pyao.engine.rerun.kinds import Content
from hf_pyao.engine.transfer.layout import has_storage
from hf_pyao.errors import RecomputationError

_VERSION = operator.attrgetter("_version")
_WHOLE = (Tensor, Parameter)
"""Types of parameters that nobody has sharded."""

MOST_TENSOR_BYTES = 2**20
"""Tensors up to this size are copied where they may change in place, and held where replaced."""
MOST_ITEMS = 4096
"""Containers up to this length are noted."""
MOST_HOLDERS = 200_000
"""Containers and objects that are noted of one model."""


def version_of(tensor: Tensor) -> int:
    """Return how often *tensor* was changed in place; 0 for one that does not count."""
    return 0 if tensor.is_inference() else tensor._version


class Holder(NamedTuple):
    """Something that holds values, and what it held."""

    holder: Any
    content: Content
    copy: Any


class NotedTensor(NamedTuple):
    """A tensor that a module holds, not as a parameter."""

    tensor: Tensor
    version: int
    copy: Tensor | None
    """What it held; None where it is not expected to change in place."""

    @property
    def is_written(self) -> bool:
        """True if its version tells of a change."""
        return version_of(self.tensor) != self.version


class Loose:
    """Stands for a tensor that an inventory does not hold: it is large, or hangs on a graph."""

    __slots__ = ("ref", "value")

    def __init__(self, tensor: Tensor) -> None:
        self.ref = weakref.ref(tensor)
        is_small = has_storage(tensor) and tensor.nbytes <= MOST_TENSOR_BYTES
        self.value = tensor.detach() if is_small else None
        """The same without its graph, where that is small."""

    def version(self) -> int:
        """Return how often the tensor was changed in place; -1 if it is gone."""
        tensor = self.ref()
        return -1 if tensor is None else version_of(tensor)


class Found:
    """What was found, as it was."""

    def __init__(self) -> None:
        self.holders: list[Holder] = []
        self.empty: list[Any] = []
        """Containers in which there was nothing."""
        self.parameters: list[Parameter] = []
        self.tensors: list[tuple[Tensor, bool]] = []
        """Other tensors, and whether a norm keeps statistics in them."""
        self.generators: list[Any] = []
        self.unknown: list[Any] = []
        """What cannot be noted: iterators, and containers that are too long."""
        self.loose: list[Loose] = []
        self.hook_tables: set[int] = set()
        """Ids of the modules' tables of hooks."""
        self._own_tables: list[dict[Any, Any]] = []
        """Those that hold nothing but hooks of this package: their lengths tell of others."""
        self._mappings: list[dict[Any, Any]] = []
        self._sequences: list[Any] = []
        self._others: list[Holder] = []
        self._keys: list[Any] = []
        self._addresses = b""
        """Of all values, which are held by the copies in :attr:`holders`, but for loose ones."""
        self._lengths: list[int] = []

    def close(self) -> None:
        """Prepare for :meth:`is_same` to be quick, once all was found."""
        for each in self.holders:
            if isinstance(each.holder, dict):
                is_table = id(each.holder) in self.hook_tables
                has_own_alone = is_table and all(map(_is_own, each.copy.values()))
                (self._own_tables if has_own_alone else self._mappings).append(each.holder)
            elif each.content.is_counted:
                self._sequences.append(each.holder)
            else:
                self._others.append(each)
        self._keys = list(chain.from_iterable(self._mappings))
        self._lengths = self._lengths_now()
        self._addresses = self._addresses_now()

    def is_same(self) -> bool:
        """Say whether all holds the very objects that it held; written without a loop in Python."""
        return (
            not any(self.empty)
            and self._lengths == self._lengths_now()
            and self._addresses == self._addresses_now()
            and self._keys == list(chain.from_iterable(self._mappings))
            and all(each.ref() is not None for each in self.loose)  # or an address is another's
            and all(each.content.same(each.holder, each.copy) for each in self._others)
        )

    def _addresses_now(self) -> bytes:
        """Return the addresses of all values: an array of objects holds nothing else.

        This takes a third of the time of ``map(operator.is_, ...)``.
        """
        of_mappings = chain.from_iterable(map(dict.values, self._mappings))
        values = chain(of_mappings, chain.from_iterable(self._sequences))
        return numpy.fromiter(values, dtype=object).tobytes()

    def _lengths_now(self) -> list[int]:
        return [*map(len, chain(self._own_tables, self._mappings, self._sequences))]


def entries(copy: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and items in a copy of a container's content."""
    if type(copy) is dict:
        return copy.items()
    return enumerate(copy) if type(copy) is list else ()


def exchanged(copy: Any, exchange: Callable[[Any], Any]) -> Any:
    """Return *copy* with *exchange* done to its items, and to those of tuples in it."""
    if type(copy) is dict:
        return {key: _exchanged_item(item, exchange) for key, item in copy.items()}
    if type(copy) is list:
        return [_exchanged_item(item, exchange) for item in copy]
    return copy


def _exchanged_item(item: Any, exchange: Callable[[Any], Any]) -> Any:
    if not isinstance(item, tuple):
        return exchange(item)
    items = [_exchanged_item(each, exchange) for each in item]
    if all(a is b for a, b in zip(items, item, strict=True)):
        return item
    return type(item)(*items) if hasattr(item, "_fields") else tuple(items)


def with_present(holder: Any, copy: Any) -> Any:
    """Return *copy* but for what engines have put into *holder* since, which is to stay.

    These are parameters that are sharded, views of a parameter that an engine has flattened, and
    what stands for a module's ``forward`` while a thread of this package has exchanged it.
    """
    if type(copy) is not dict or not isinstance(holder, dict):
        return copy
    wanted = dict(copy)
    for key, now in holder.items():
        noted = copy.get(key)
        if now is not noted and (_is_of_engine(now) or _is_of_engine(noted)):
            wanted[key] = now
    for key, noted in copy.items():
        if key not in holder and _is_of_engine(noted):
            del wanted[key]
    return wanted


def without_ours(holder: Any, copy: Any) -> Any:
    """Return *copy* but for what this package has put into *holder*, or taken away, since.

    torch notes about hooks in dictionaries of their own, by the number of a hook. No number is
    given twice, so that what is noted of others is no harm.
    """
    if not isinstance(holder, dict) or type(copy) is not dict:
        return copy
    if holder and all(type(each) is bool for each in holder.values()):
        return {**copy, **holder}
    wanted = {key: each for key, each in copy.items() if not _is_ours(each)}
    return wanted | {key: each for key, each in holder.items() if _is_ours(each)}


def _is_own(value: Any) -> bool:
    """Say whether an entry in a table of hooks is of this package, or a flag of some hook's."""
    return value is True or _is_ours(value)


def _is_ours(value: Any) -> bool:
    of = getattr(value, "__module__", None) or type(value).__module__
    return isinstance(of, str) and of.startswith("hf_pyao.")


def _is_of_engine(value: Any) -> bool:
    if isinstance(value, Tensor):
        if isinstance(value, Parameter) or type(value) is not Tensor:
            return type(value) not in _WHOLE
        return isinstance(value._base, Parameter)
    return type(value).__module__ == "hf_pyao.model.patching.exchanged_forwards"


def is_recorder(forward: Any) -> bool:
    """Say whether *forward* of a module collects what the module returns, for one forward.

    transformers 4 puts such functions in for ``output_hidden_states`` and its like, and takes them
    out as the model's forward ends. What is collected holds the graph that holds an inventory, so
    that a step would never be freed; and a second run has nothing to collect.
    """
    return (
        isinstance(forward, types.FunctionType)
        and forward.__code__.co_name == "wrapped_forward"
        and forward.__globals__.get("__name__") == "transformers.utils.generic"
    )


def put(each: Holder, copy: Any) -> None:
    """Put *copy* into a holder; what engines have put there since stays."""
    if not each.content.same(each.holder, copy):
        each.content.put(each.holder, with_present(each.holder, copy))


def entry_of(holder: Any, key: Any) -> Any:
    """Return what is in *holder* under *key* now; None if nothing is, or it has no keys."""
    if isinstance(holder, dict):
        return holder.get(key)
    return holder[key] if isinstance(holder, list) and key < len(holder) else None


def tensor_of(value: Any) -> Any:
    """Return the tensor that *value* stands for, None if that is gone; others as they are."""
    return value.ref() if type(value) is Loose else value


def living(loose: Loose) -> Tensor:
    """Return the tensor that *loose* stands for, or the same without its graph.

    Raises:
        RecomputationError: it is gone, and is large.
    """
    tensor = loose.ref()
    if tensor is None:
        tensor = loose.value
    if tensor is None:
        raise RecomputationError(
            "a large tensor that a module held in forward is gone.", key="changed-before-second-run"
        )
    return tensor


def are_equal(tensor: Tensor, copy: Tensor) -> bool:
    """Say whether a tensor holds the numbers of a copy, which may be on another device."""
    return torch.equal(tensor.to(copy.device), copy)


def versions_of(parameters: list[Parameter]) -> list[int]:
    """Return how often each of *parameters* was changed in place."""
    try:
        return list(map(_VERSION, parameters))
    except RuntimeError:  # tensors of inference have none
        return list(map(version_of, parameters))
