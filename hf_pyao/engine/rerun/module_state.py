"""What a call finds in modules: looked at when it ends, and put back in part for a second run.

[Note: State of modules]
A second run finds the parameters of the first run, whose versions are compared; training flags of
modules and parameters; and buffers. A buffer that the first run has written is put back as a clone
that was taken before, so that nothing is written into what others hold. Only those are cloned that
were seen to be written, and those of norms that keep statistics, since some kernels write them
without a version telling. A buffer that is written for the first time, or is large, lets the call
run once. What this package has put on modules, such as tiles, is that of the first run, too.
Nothing else is put back: see [Note: Guards] in ``guard``.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _NormBase

from hf_pyao.engine.rerun.guard import Guard, Look, change, have_same, path_of, results_in
from hf_pyao.engine.rerun.versions import version_of, versions_of
from hf_pyao.engine.transfer.layout import has_storage
from hf_pyao.errors import SavedTensorModifiedError

MOST_BUFFER_BYTES = 2**20
"""Buffers up to this size are cloned."""
_TABLES = operator.itemgetter("_parameters", "_buffers")
_CHILDREN = operator.itemgetter("_modules")
_IS_TRAINING = operator.itemgetter("training")
_IS_TRAINED = operator.attrgetter("requires_grad")
_WHOLE = (Tensor, Parameter)
"""Types of parameters that nobody has sharded."""

_ABSENT = object()

Table = dict[str, Tensor | None]


class ModuleState:
    """Knows what calls of some modules find in them, and which buffers they write.

    Args:
        roots: held weakly; those inside of them count too.
        name: of the call, for messages.
    """

    def __init__(self, roots: Iterable[nn.Module], name: str) -> None:
        self.name = name
        self.guard = Guard()
        self._roots = [weakref.ref(root) for root in roots]
        self._modules: list[weakref.ref[nn.Module]] = []
        self._children: list[int] = []
        self.written: set[tuple[int, str]] = set()
        """Buffers that are cloned: numbers of their tables, and names."""

    def modules(self) -> list[nn.Module]:
        """Return the modules, each once, in the same order as long as they are the same."""
        modules = [module for ref in self._modules if (module := ref()) is not None]
        if len(modules) != len(self._modules) or not modules or self._has_others(modules):
            inside = chain.from_iterable(root.modules() for root in self.roots())
            modules = list(dict.fromkeys(inside))
            self._modules = list(map(weakref.ref, modules))
            self._children = _children_of(modules)
            norms = [m for m in modules if isinstance(m, _NormBase) and m.track_running_stats]
            at = {id(module): 2 * number + 1 for number, module in enumerate(modules)}
            self.written = {(at[id(norm)], name) for norm in norms for name in norm._buffers}
        return modules

    def roots(self) -> list[nn.Module]:
        """Return the roots that are there still."""
        return [root for ref in self._roots if (root := ref()) is not None]

    def _has_others(self, modules: list[nn.Module]) -> bool:
        return self._children != _children_of(modules)

    def names(self) -> list[str]:
        """Return the names of the modules, for messages."""
        found = chain.from_iterable(root.named_modules() for root in self.roots())
        return list({id(module): name for name, module in found}.values())

    def now(self, arguments: Sequence[object] = ()) -> StateOfCall:
        """Note what a call finds that begins; *arguments* are objects that it is given."""
        return StateOfCall(self, self.modules(), arguments)


class StateOfCall:
    """What one call finds in *modules*; see [Note: State of modules]."""

    def __init__(
        self, state: ModuleState, modules: list[nn.Module], arguments: Sequence[object]
    ) -> None:
        self._state = state
        self._modules = modules
        self._arguments = arguments
        self._look: Look | None = state.guard.look(modules, arguments)
        attributes = self._look.attributes
        self._are_training = list(map(_IS_TRAINING, attributes))
        self._tables = list(map(dict.copy, chain.from_iterable(map(_TABLES, attributes))))
        """Parameters and buffers of each module."""
        self._has_buffers = any(self._tables[1::2])
        self._tensors = tensors_in(self._tables)
        self._versions = versions_of(self._tensors)
        self._are_trained = list(map(_IS_TRAINED, self._tensors))
        self._copies = {
            id(each): each.detach().clone()
            for at, name in state.written
            if (each := self._tables[at].get(name)) is not None
        }
        """Of buffers, by their ids."""
        self._ours = [(at, key, attributes[at][key]) for at, key in self._look.ours]
        """What this package has put on modules: a layer runs again with the same."""
        self._results: list[tuple[int, str]] = []

    # ---- the end of the first run --------------------------------------------------------------

    def reason_unknown(self) -> str:
        """Return why the call cannot run again, whatever it does; empty if there is no reason."""
        assert self._look is not None
        buffers = tensors_in(self._tables[1::2]) if self._has_buffers else ()
        if any(each.grad_fn is not None for each in buffers):
            return "it holds a buffer that backward goes through"
        if self._arguments and any(each.grad_fn is not None for each in self._look.tensors):
            return "an object that it is given holds a tensor that backward goes through"
        return self._state.guard.reason_never(self._look, self._state.names)

    def reason_not_again(self) -> str:
        """Return why the call, which ends, cannot run again; empty if it can. To be asked once."""
        before, self._look = self._look, None
        assert before is not None
        now = self._state.guard.look(self._modules, self._arguments)
        self._arguments = ()
        self._results = results_in(before, now)
        changed = self._written_tensor() or change(before, now, self._state.names)
        return changed and f"its forward changes {changed}"

    def _written_tensor(self) -> str:
        """Name a parameter that was written, or a buffer of which there is no copy."""
        live = list(chain.from_iterable(map(_TABLES, map(vars, self._modules))))
        is_same = not self._has_buffers or have_same(self._tables, live)
        if is_same and versions_of(self._tensors) == self._versions:
            return ""
        versions = dict(zip(map(id, self._tensors), self._versions, strict=True))
        found = ""
        for at, (noted, table) in enumerate(zip(self._tables, live, strict=True)):
            for name, each in noted.items():
                if each is None or id(each) in self._copies:
                    continue
                is_written = version_of(each) != versions[id(each)]
                is_small = has_storage(each) and each.nbytes <= MOST_BUFFER_BYTES
                if is_written or (at % 2 and not is_small and table.get(name) is not each):
                    what = "a buffer, for the first time" if is_small else "a large buffer"
                    what = what if at % 2 else "a parameter, in place"
                    found = found or f"{path_of(self._state.names, at // 2, name)}, {what}"
                    if at % 2 and is_small:
                        self._state.written.add((at, name))
        return found

    # ---- the second run ------------------------------------------------------------------------

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Put back what is; changes made to that inside of this context do not outlast it.

        Where :meth:`reason_not_again` was not asked, all else must be as it was, too.

        Raises:
            SavedTensorModifiedError: a parameter was changed since, or a buffer of which there is
                no copy, or something else that must be as it was.
        """
        self._check()
        held = list(map(vars, self._modules))
        live = list(chain.from_iterable(map(_TABLES, held)))
        before = list(map(dict.copy, live))
        are_training = list(map(_IS_TRAINING, held))
        are_trained = list(map(_IS_TRAINED, self._tensors))
        places = [*self._results, *(place[:2] for place in self._ours)]
        bound = [(held[at], key, held[at].get(key, _ABSENT)) for at, key in places]
        try:
            self._switch(held, self._are_training, self._are_trained)
            for at, key, value in self._ours:
                held[at][key] = value
            if self._copies or not have_same(self._tables, live):
                fill(live, [self._with_copies(each) for each in self._tables])
            yield
        finally:
            if not have_same(before, live):
                fill(live, before)
            self._switch(held, are_training, are_trained)
            for attributes, key, value in bound:
                if value is _ABSENT:
                    attributes.pop(key, None)
                else:
                    attributes[key] = value

    def _check(self) -> None:
        changed = ""
        if versions_of(self._tensors) != self._versions:
            for each, version in zip(self._tensors, self._versions, strict=True):
                if version_of(each) != version and id(each) not in self._copies:
                    changed = f"{self._name_of(each)} was changed in place"
        if self._look is not None and not changed:
            now = self._state.guard.look(self._modules, self._arguments)
            other = change(self._look, now._replace(hooks=self._look.hooks), self._state.names)
            changed = other and f"{other} was changed"
        if changed:
            raise SavedTensorModifiedError(
                f"{self._state.name} has to run again in backward (checkpoint_every, mlp_tiles), "
                f"and {changed} after its forward. Run backward before the optimizer steps, or "
                "give checkpoint_every=0 and mlp_tiles='off'.",
                key="changed-before-second-run",
            )

    def _name_of(self, tensor: Tensor) -> str:
        for at, table in enumerate(self._tables):
            for name, each in table.items():
                if each is tensor:
                    what = "a buffer" if at % 2 else "a parameter"
                    return f"{path_of(self._state.names, at // 2, name)}, {what},"
        return "a tensor"

    def _with_copies(self, table: Table) -> Table:
        """Return *table* with fresh copies of what is written."""
        return {
            name: each if (copy := self._copies.get(id(each))) is None else copy.clone()
            for name, each in table.items()
        }

    def _switch(
        self, held: list[dict[str, Any]], are_training: list[bool], are_trained: list[bool]
    ) -> None:
        """Make the training flags of modules and parameters what is given."""
        if list(map(_IS_TRAINING, held)) != are_training:
            for attributes, is_training in zip(held, are_training, strict=True):
                attributes["training"] = is_training
        train(self._tensors, are_trained)


def _children_of(modules: Iterable[nn.Module]) -> list[int]:
    """Return the ids of all sub-modules."""
    tables = map(_CHILDREN, map(vars, modules))
    return list(map(id, chain.from_iterable(map(dict.values, tables))))


def train(parameters: Sequence[Tensor], are_trained: list[bool]) -> None:
    """Freeze and thaw *parameters*, so that those are trained that *are_trained*."""
    if list(map(_IS_TRAINED, parameters)) == are_trained:
        return
    for each, is_trained in zip(parameters, are_trained, strict=True):
        if each.requires_grad != is_trained and each.is_leaf:
            each.requires_grad_(is_trained)


def tensors_in(tables: list[Table]) -> list[Any]:
    """Return the tensors in *tables*."""
    return [each for each in chain.from_iterable(map(dict.values, tables)) if each is not None]


def fill(tables: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Make each of *tables* hold what is *wanted*, but for what engines have put there since."""
    for table, others in zip(tables, wanted, strict=True):
        merged = {
            name: now
            if (now := table.get(name)) is not None and (is_of_engine(now) or is_of_engine(each))
            else each
            for name, each in others.items()
        }
        if list(table) != list(merged):
            table.clear()
        if table.keys() != merged.keys() or any(table[key] is not merged[key] for key in merged):
            table.update(merged)


def is_of_engine(value: Any) -> bool:
    """Say whether *value* in a table of parameters is sharded, or a view of a parameter."""
    if not isinstance(value, Tensor):
        return False
    if isinstance(value, Parameter) or type(value) is not Tensor:
        return type(value) not in _WHOLE
    return isinstance(value._base, Parameter)
