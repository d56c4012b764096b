"""What modules hold, to be put back for good: for a micro-batch that runs again, and for a proof.

Put back are attributes, the tables of parameters, buffers and sub-modules, training flags of
parameters, and generators of random numbers that attributes hold. What containers, objects and
arrays hold is compared; so are hooks. A large tensor, or one with a graph, is held weakly: where an
attribute has let go of it, that cannot be undone.
"""

from __future__ import annotations

import operator
import weakref
from itertools import chain
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from hf_pyao.engine.rerun.generators import generator_kinds, same_state
from hf_pyao.engine.rerun.guard import Look, change, have_same, is_ours, items_in, path_of
from hf_pyao.engine.rerun.module_state import (
    MOST_BUFFER_BYTES,
    ModuleState,
    fill,
    tensors_in,
    train,
)
from hf_pyao.engine.transfer.layout import has_storage

_TABLES = operator.itemgetter("_parameters", "_buffers", "_modules")
_IS_TRAINED = operator.attrgetter("requires_grad")
_NO_TENSORS: dict[str, Any] = {"tensors": [], "versions": []}


class HeldState:
    """What the modules of *state* hold when this is made."""

    def __init__(self, state: ModuleState) -> None:
        self._state = state
        self._modules = state.modules()
        look = state.guard.look(self._modules)
        self._tables = list(map(dict.copy, chain.from_iterable(map(_TABLES, look.attributes))))
        self.parameters: list[Parameter] = tensors_in(self._tables[::3])
        """Those that there were, each once."""
        self._are_trained = list(map(_IS_TRAINED, self.parameters))
        self.tensors = [weakref.ref(each) for each in (*self.buffers(), *look.tensors)]
        """Buffers, and tensors that attributes hold."""
        kinds = generator_kinds()
        held = (*chain.from_iterable(map(dict.values, look.attributes)), *look.items)
        found = {id(each): each for each in held if type(each) in kinds}
        self._generators = [(each, kinds[type(each)].get(each)) for each in found.values()]
        self._look = _loosened(look) if look.tensors else look

    def buffers(self) -> list[Tensor]:
        """Return the buffers that there were, each once."""
        return tensors_in(self._tables[1::3])

    def reason_not_undone(self) -> str:
        """Return why :meth:`undo` cannot bring all of it back, or an empty string."""
        before, now = self._look, self._state.guard.look(self._modules)
        items, sizes = items_in(before.holders, [])
        as_was = now._replace(
            attributes=before.attributes,
            items=items,
            sizes=sizes,
            num_children=before.num_children,
            **_NO_TENSORS,
        )
        if changed := change(before._replace(**_NO_TENSORS), as_was):
            return f"it changes {changed}, which cannot be undone"
        for attributes in before.attributes:
            for key, value in attributes.items():
                if type(value) is weakref.ref and value() is None:
                    return f"a module has let go of {key!r}, a tensor"
        return ""

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of *tensor* for messages."""
        for at, held in enumerate(map(vars, self._modules)):
            for key, each in (*held["_buffers"].items(), *held.items()):
                if each is tensor:
                    return path_of(self._state.names, at, key)
        return "a tensor"

    def first_change(self) -> str:
        """Name what is not as it was, or return an empty string."""
        tables = list(chain.from_iterable(map(_TABLES, map(vars, self._modules))))
        if not have_same(self._tables[1::3], tables[1::3]):
            return "a buffer"
        return change(self._look, self._state.guard.look(self._modules), self._state.names)

    def drew(self) -> bool:
        """Say whether a generator that an attribute holds has given numbers since."""
        kinds = generator_kinds()
        return not all(same_state(kinds[type(g)].get(g), then) for g, then in self._generators)

    def undo(self) -> None:
        """Put it back, but for what this package has put on modules since, and what engines have.

        What :meth:`reason_not_undone` tells of is left as it is.
        """
        kinds = generator_kinds()
        for generator, then in self._generators:
            kinds[type(generator)].set(generator, then)
        train(self.parameters, self._are_trained)
        for module, attributes in zip(self._modules, self._look.attributes, strict=True):
            held = vars(module)
            for key in [key for key in held if key not in attributes and not is_ours(held[key])]:
                del held[key]
            for key, value in attributes.items():
                old = value() if type(value) is weakref.ref else value
                new = held.get(key)
                if new is not old and not (is_ours(old) or is_ours(new)):
                    held[key] = old
        fill(list(chain.from_iterable(map(_TABLES, map(vars, self._modules)))), self._tables)


def _loosened(look: Look) -> Look:
    """Return *look* with weak references to tensors, where these are large or have a graph."""
    return look._replace(
        attributes=[{k: _loose(v) for k, v in each.items()} for each in look.attributes],
        items=list(map(_loose, look.items)),
        **_NO_TENSORS,
    )


def _loose(value: Any) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, Parameter):
        return value
    is_small = has_storage(value) and value.nbytes <= MOST_BUFFER_BYTES
    return value if is_small and not value.requires_grad else weakref.ref(value)
