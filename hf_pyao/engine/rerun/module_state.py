"""What a call finds in modules: looked at when it ends, and put back in part for a second run.

[Note: State of modules]
A second run finds the parameters of the first run, whose versions are compared; training flags of
modules and parameters; and buffers. A buffer that the first run has written is put back as a clone
that was taken before, so that nothing is written into what others hold. Only those are cloned that
were seen to be written, and those of norms that keep statistics, since some kernels write them
without a version telling. A buffer that is written for the first time, or is large, lets the call
run once.
Nothing else is put back: see [Note: Guards] in ``guard``.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _NormBase

from hf_pyao.engine.rerun.guard import Look, are_ours, change, have_same, look_at, path_of
from hf_pyao.engine.rerun.versions import version_of, versions_of
from hf_pyao.engine.transfer.layout import has_storage
from hf_pyao.errors import SavedTensorModifiedError

MOST_BUFFER_BYTES = 2**20
"""Buffers up to this size are cloned."""
_IS_TRAINING = operator.attrgetter("training")
_IS_TRAINED = operator.attrgetter("requires_grad")
_HANDLES = "_pyao_handles_forward"
"""The attribute that says what this package runs instead of a module's forward."""

Table = dict[str, Tensor | None]
"""Parameters or buffers of a module, by name."""
Flags = tuple[list[bool], list[bool]]
"""Training flags of modules, and of parameters and buffers."""
Patches = list[tuple[dict[str, Any], dict[str, Any]]]
"""Dictionaries of modules, and what of this package was in them."""


class ModuleState:
    """Knows what calls of some modules find in them, and which buffers they write.

    Args:
        roots: held weakly; those inside of them count too.
        name: of the call, for messages.

    Attributes:
        written: buffers that are cloned: numbers of their modules, and names.
    """

    def __init__(self, roots: Iterable[nn.Module], name: str) -> None:
        self.name = name
        self._roots = [weakref.ref(root) for root in roots]
        self._known: list[weakref.ref[nn.Module]] = []
        self._children: list[int] = []
        """Which modules the known ones have, by id."""
        self.written: set[tuple[int, str]] = set()

    def modules(self) -> list[nn.Module]:
        """Return the modules, each once."""
        known = [module for ref in self._known if (module := ref()) is not None]
        if not known or self._children != _children_of(known):
            inside = chain.from_iterable(root.modules() for root in self.roots())
            known = list(dict.fromkeys(inside))
            self._known, self._children = list(map(weakref.ref, known)), _children_of(known)
            self.written = {
                (at, name)
                for at, module in enumerate(known)
                for name in (module._buffers if isinstance(module, _NormBase) else ())
            }
        return known

    def roots(self) -> list[nn.Module]:
        """Return the roots that are there still."""
        return [root for ref in self._roots if (root := ref()) is not None]

    def names(self) -> list[str]:
        """Return the names of the modules, for messages."""
        found = chain.from_iterable(root.named_modules() for root in self.roots())
        return list({id(module): name for name, module in found}.values())


def _children_of(modules: Iterable[nn.Module]) -> list[int]:
    tables = (module._modules for module in modules)
    return list(map(id, chain.from_iterable(map(dict.values, tables))))


class StateOfCall:
    """What one call finds in the modules of *state*; see [Note: State of modules].

    Args:
        state: of the modules.
        clones_all: small buffers, and small tensors in attributes, are cloned whether or not they
            were seen to be written.
    """

    def __init__(self, state: ModuleState, *, clones_all: bool = False) -> None:
        self._state = state
        self._modules = state.modules()
        self._look: Look | None = look_at(map(vars, self._modules))
        self._parameters: list[Table] = [{**module._parameters} for module in self._modules]
        self._buffers = [{**module._buffers} for module in self._modules]
        self._tensors = tensors_in([*self._parameters, *self._buffers])
        self._versions = versions_of(self._tensors)
        self._flags, self._patches = self._flags_now(), self._patches_now()
        cloned = [self._buffers[at].get(name) for at, name in state.written]
        if clones_all:
            cloned += filter(is_small, (*tensors_in(self._buffers), *self._look.tensors))
        self._copies = {id(each): each.detach().clone() for each in cloned if each is not None}
        """Of buffers and tensors in attributes, by their ids."""

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters that there were, each once."""
        return list(dict.fromkeys(tensors_in(self._parameters)))

    # ---- the end of the first run --------------------------------------------------------------

    def reason_unknown(self) -> str:
        """Return why the call cannot run again, whatever it does; empty if there is no reason."""
        assert self._look is not None
        if any(each.grad_fn is not None for each in tensors_in(self._buffers)):
            return "it holds a buffer that backward goes through"
        return self._look.reason_unsteady(self._state.names)

    def reason_not_again(self) -> str:
        """Return why the call, which ends, cannot run again; empty if it can. To be asked once."""
        changed, self._look = self._change(), None
        return changed and f"its forward changes {changed}"

    def first_change(self) -> str:
        """Name what is not as it was, a buffer that is another tensor included; or nothing."""
        if not have_same(self._buffers, [module._buffers for module in self._modules]):
            return "a buffer"
        return self._change()

    def _change(self) -> str:
        """Name what is not as it was. Buffers that it has written are cloned from now on."""
        assert self._look is not None
        if written := self._written():
            self._state.written |= {
                (at, name)
                for at, table in enumerate(self._buffers)
                for name, each in table.items()
                if any(each is other for other in written) and is_small(each)
            }
            return f"{self._name_of(written[0])}, in place"
        return change(self._look, look_at(map(vars, self._modules)), self._state.names)

    def _written(self) -> list[Tensor]:
        """Return the parameters and buffers that were written, but for those with a copy."""
        if versions_of(self._tensors) == self._versions:
            return []
        both = zip(self._tensors, self._versions, strict=True)
        return [t for t, version in both if version_of(t) != version and id(t) not in self._copies]

    def _name_of(self, tensor: Tensor) -> str:
        for at, tables in enumerate(zip(self._parameters, self._buffers, strict=True)):
            for table in tables:
                for name, each in table.items():
                    if each is tensor:
                        return path_of(self._state.names, at, name)
        return "a tensor"

    # ---- undoing it for good -------------------------------------------------------------------

    def reason_not_undone(self) -> str:
        """Return why :meth:`undo` cannot bring all of it back, or an empty string.

        It puts back attributes, the tables of buffers, what was cloned, and training flags of
        parameters. What containers, objects and arrays hold is compared; so are hooks, and which
        sub-modules and parameters there are.
        """
        look = self._look
        assert look is not None
        if written := self._written():
            if isinstance(written[0], Parameter):
                return "parameters were changed in it, as by an optimizer that steps in backward"
            return f"{self._name_of(written[0])} was changed in place, and has no copy"
        both = zip(look.tensors, look.versions, strict=True)
        kept = [(each, version) for each, version in both if id(each) not in self._copies]
        before = look._replace(tensors=[each for each, _ in kept], versions=[v for _, v in kept])
        changed = change(before, look_at(look.attributes), self._state.names)
        changed = changed and f"it changes {changed}, which cannot be undone"
        return look.reason_unsteady(self._state.names) or changed

    def undo(self) -> None:
        """Put it back, but for what this package has put on modules since."""
        look = self._look
        assert look is not None
        train(self._tensors, self._flags[1])
        for module, attributes in zip(self._modules, look.attributes, strict=True):
            held = vars(module)
            for key in [key for key in held if key not in attributes]:
                if not are_ours(key, held[key]):
                    del held[key]
            for key, old in attributes.items():
                if not are_ours(key, old, held.get(key)):
                    held[key] = old
        fill([module._buffers for module in self._modules], self._buffers)
        with torch.no_grad():
            for tensor in (*self._tensors, *look.tensors):
                copy = self._copies.get(id(tensor))
                if copy is not None and not torch.equal(tensor, copy):
                    tensor.copy_(copy)

    # ---- the second run ------------------------------------------------------------------------

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Put back what is; changes made to that inside of this context do not outlast it.

        Where :meth:`reason_not_again` was not asked, all else must be as it was, too.

        Raises:
            SavedTensorModifiedError: a parameter was changed since, or a buffer of which there is
                no copy, or something else that must be as it was.
        """
        if changed := self._change_since():
            raise SavedTensorModifiedError(
                f"{self._state.name} has to run again in backward (checkpoint_every, mlp_tiles), "
                f"and {changed} after its forward. Run backward before the optimizer steps, or "
                "give checkpoint_every=0 and mlp_tiles='off'.",
                key="changed-before-second-run",
            )
        live: list[Table] = [module._parameters for module in self._modules]  # type: ignore[misc]
        then = list(map(_parameters_then, self._parameters, live))
        then += [{k: self._copied(v) for k, v in table.items()} for table in self._buffers]
        live += [module._buffers for module in self._modules]
        tables = [{**table} for table in live]
        flags, patches = self._flags_now(), self._patches_now()
        try:
            self._set(self._patches, self._flags)
            fill(live, then)
            yield
        finally:
            fill(live, tables)
            self._set(patches, flags)

    def _change_since(self) -> str:
        """Say what was changed since the first run and is not put back; empty if nothing was."""
        if written := self._written():
            return f"{self._name_of(written[0])} was changed in place"
        if self._look is None:
            return ""
        now = look_at(map(vars, self._modules))._replace(counts=self._look.counts)
        changed = change(self._look, now, self._state.names)
        return changed and f"{changed} was changed"

    def _copied(self, buffer: Tensor | None) -> Tensor | None:
        copy = self._copies.get(id(buffer))
        return buffer if copy is None else copy.clone()

    def _flags_now(self) -> Flags:
        return list(map(_IS_TRAINING, self._modules)), list(map(_IS_TRAINED, self._tensors))

    def _patches_now(self) -> Patches:
        """Return what runs instead of forwards, such as tiles: in both runs it is the same."""
        return [
            (held, {key: held[key] for key in held if key.startswith("_pyao_")})
            for held in map(vars, self._modules)
            if _HANDLES in held
        ]

    def _set(self, patches: Patches, flags: Flags) -> None:
        for held, wanted in patches:
            held.update({key: wanted[key] for key in wanted if key in held})
        for module, is_training in zip(self._modules, flags[0], strict=True):
            vars(module)["training"] = is_training
        train(self._tensors, flags[1])


def is_small(buffer: Tensor | None) -> bool:
    """Say whether *buffer* is cloned where it is written."""
    if buffer is None or not has_storage(buffer) or buffer.is_meta:
        return False
    return buffer.nbytes <= MOST_BUFFER_BYTES


def train(parameters: Sequence[Tensor], are_trained: list[bool]) -> None:
    """Freeze and thaw *parameters*, so that those are trained that *are_trained*."""
    if list(map(_IS_TRAINED, parameters)) == are_trained:
        return
    for each, is_trained in zip(parameters, are_trained, strict=True):
        if each.requires_grad != is_trained and each.is_leaf:
            each.requires_grad_(is_trained)


def tensors_in(tables: Iterable[dict[str, Any]]) -> list[Any]:
    """Return the tensors in *tables*."""
    return [each for each in chain.from_iterable(map(dict.values, tables)) if each is not None]


def fill(tables: list[Table], wanted: list[Table]) -> None:
    """Make each of *tables* hold what is *wanted*."""
    if have_same(tables, wanted):
        return
    for table, others in zip(tables, wanted, strict=True):
        if not have_same([table], [others]):
            table.clear()
            table.update(others)


def _parameters_then(then: Table, now: Table) -> Table:
    """Return parameters as they were *then*; those of *now* where an engine shards them."""
    return {
        name: then[name] if _is_plain(each) and _is_plain(then.get(name)) else each
        for name, each in now.items()
    }


def _is_plain(parameter: Tensor | None) -> bool:
    """Say whether *parameter* is neither sharded nor a view of what is."""
    if parameter is None or type(parameter) not in (Tensor, Parameter):
        return False
    return parameter._base is None or not isinstance(parameter._base, Parameter)
