"""What modules hold, to be put back for good: for a micro-batch that runs again, and for a proof.

Put back are attributes, the tables of parameters, buffers and sub-modules, training flags of
parameters, and generators of random numbers that attributes hold. What containers, objects and
arrays hold is compared; so are hooks.
"""

from __future__ import annotations

import operator
from itertools import chain

from torch import Tensor
from torch.nn import Parameter

from hf_pyao.engine.rerun.generators import same_state, set_state, state_of
from hf_pyao.engine.rerun.guard import are_ours, change, have_same, is_generator, items_in
from hf_pyao.engine.rerun.module_state import ModuleState, fill, tensors_in, train

_TABLES = operator.itemgetter("_parameters", "_buffers", "_modules")
_IS_TRAINED = operator.attrgetter("requires_grad")


class HeldState:
    """What the modules of *state* hold when this is made."""

    def __init__(self, state: ModuleState) -> None:
        self._state = state
        self._modules = state.modules()
        self._look = look = state.guard.look(self._modules)
        self._tables = list(map(dict.copy, chain.from_iterable(map(_TABLES, look.attributes))))
        self.parameters: list[Parameter] = list(dict.fromkeys(tensors_in(self._tables[::3])))
        """Those that there were, each once."""
        self._are_trained = list(map(_IS_TRAINED, self.parameters))
        self.tensors: list[Tensor] = [*tensors_in(self._tables[1::3]), *look.tensors]
        """Buffers, and tensors that attributes hold."""
        held = (*chain.from_iterable(map(dict.values, look.attributes)), *look.items)
        generators = {id(each): each for each in held if is_generator(type(each))}
        self._generators = [(each, state_of(each)) for each in generators.values()]

    def reason_not_undone(self) -> str:
        """Return why :meth:`undo` cannot bring all of it back, or an empty string."""
        before = self._look._replace(tensors=[], versions=[])  # these are put back
        items, sizes = items_in(before.holders, [])
        now = self._state.guard.look(self._modules)
        as_was = before._replace(items=items, sizes=sizes, arrays=now.arrays, hooks=now.hooks)
        changed = change(before, as_was)
        return changed and f"it changes {changed}, which cannot be undone"

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of one of :attr:`tensors`, for messages."""
        for name, attributes in zip(self._state.names(), self._look.attributes, strict=True):
            for key, each in (*attributes["_buffers"].items(), *attributes.items()):
                if each is tensor:
                    return repr(f"{name}.{key}".strip("."))
        return "a tensor that an attribute holds"

    def first_change(self) -> str:
        """Name what is not as it was, or return an empty string."""
        tables = list(chain.from_iterable(map(_TABLES, map(vars, self._modules))))
        if not have_same(self._tables[1::3], tables[1::3]):
            return "a buffer"
        return change(self._look, self._state.guard.look(self._modules), self._state.names)

    def drew(self) -> bool:
        """Say whether a generator that an attribute holds has given numbers since."""
        return not all(same_state(state_of(each), then) for each, then in self._generators)

    def undo(self) -> None:
        """Put it back, but for what this package has put on modules since, and what engines have.

        What :meth:`reason_not_undone` tells of is left as it is.
        """
        for generator, then in self._generators:
            set_state(generator, then)
        train(self.parameters, self._are_trained)
        for module, attributes in zip(self._modules, self._look.attributes, strict=True):
            held = vars(module)
            added = [key for key in held if key not in attributes]
            for key in [key for key in added if not are_ours(key, held[key])]:
                del held[key]
            for key, old in attributes.items():
                new = held.get(key)
                if new is not old and not are_ours(key, old, new):
                    held[key] = old
        fill(list(chain.from_iterable(map(_TABLES, map(vars, self._modules)))), self._tables)
