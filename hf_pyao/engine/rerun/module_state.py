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

from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _NormBase

from hf_pyao.engine.rerun.guard import (
    Look,
    change,
    have_same,
    look_at,
    path_of,
)
from hf_pyao.engine.rerun.versions import version_of, versions_of
from hf_pyao.engine.transfer.layout import has_storage
from hf_pyao.errors import SavedTensorModifiedError

MOST_BUFFER_BYTES = 2**20
"""Buffers up to this size are cloned."""
_TABLES = operator.itemgetter("_parameters", "_buffers")
_IS_TRAINING = operator.itemgetter("training")
_IS_TRAINED = operator.attrgetter("requires_grad")
_HANDLES = "_pyao_handles_forward"
"""The attribute that says what this package runs instead of a module's forward."""

Table = dict[str, Tensor | None]
"""Parameters or buffers of a module, by name."""


class ModuleState:
    """Knows what calls of some modules find in them, and which buffers they write.

    Args:
        roots: held weakly; those inside of them count too.
        name: of the call, for messages.
    """

    def __init__(self, roots: Iterable[nn.Module], name: str) -> None:
        self.name = name
        self._roots = [weakref.ref(root) for root in roots]
        self.written: set[tuple[int, str]] = set()
        """Buffers that are cloned: numbers of their modules, and names."""

    def modules(self) -> list[nn.Module]:
        """Return the modules, each once."""
        inside = chain.from_iterable(root.modules() for root in self.roots())
        return list(dict.fromkeys(inside))

    def roots(self) -> list[nn.Module]:
        """Return the roots that are there still."""
        return [root for ref in self._roots if (root := ref()) is not None]

    def names(self) -> list[str]:
        """Return the names of the modules, for messages."""
        found = chain.from_iterable(root.named_modules() for root in self.roots())
        return list({id(module): name for name, module in found}.values())

    def now(self, modules: list[nn.Module] | None = None) -> StateOfCall:
        """Note what a call finds that begins; *modules*: its own, where they are known."""
        return StateOfCall(self, self.modules() if modules is None else modules)


class StateOfCall:
    """What one call finds in the modules of *state*; see [Note: State of modules]."""

    def __init__(self, state: ModuleState, modules: list[nn.Module]) -> None:
        self._state = state
        self._modules = modules
        self._look: Look | None = look_at(map(vars, self._modules))
        attributes = self._look.attributes
        self._are_training = list(map(_IS_TRAINING, attributes))
        self._parameters: list[Table] = [{**each["_parameters"]} for each in attributes]
        self._buffers: list[Table] = [{**each["_buffers"]} for each in attributes]
        self._tensors = tensors_in([*self._parameters, *self._buffers])
        self._versions = versions_of(self._tensors)
        self._are_trained = list(map(_IS_TRAINED, self._tensors))
        self._copies = {
            id(each): each.detach().clone()
            for at, (module, table) in enumerate(zip(self._modules, self._buffers, strict=True))
            for name, each in table.items()
            if each is not None and ((at, name) in state.written or isinstance(module, _NormBase))
        }
        """Of buffers, by their ids."""
        self._patches = [
            (vars(module), {key: each[key] for key in each if key.startswith("_pyao_")})
            for module, each in zip(self._modules, attributes, strict=True)
            if _HANDLES in each
        ]
        """What runs instead of forwards, such as tiles: that of the first run runs again."""

    # ---- the end of the first run --------------------------------------------------------------

    def reason_unknown(self) -> str:
        """Return why the call cannot run again, whatever it does; empty if there is no reason."""
        assert self._look is not None
        if any(each.grad_fn is not None for each in tensors_in(self._buffers)):
            return "it holds a buffer that backward goes through"
        return self._look.reason_unsteady(self._state.names)

    def reason_not_again(self) -> str:
        """Return why the call, which ends, cannot run again; empty if it can. To be asked once."""
        before, self._look = self._look, None
        assert before is not None
        now = look_at(map(vars, self._modules))
        written = self._written()
        self._state.written |= {
            (at, name)
            for at, table in enumerate(self._buffers if written else ())
            for name, each in table.items()
            if any(each is other for other in written) and is_small(each)
        }
        changed = f"{self._name_of(written[0])}, in place" if written else ""
        changed = changed or change(before, now, self._state.names)
        return changed and f"its forward changes {changed}"

    def _written(self) -> list[Tensor]:
        """Return the parameters and buffers that were written, but for those with a copy."""
        if versions_of(self._tensors) == self._versions:
            return []
        both = zip(self._tensors, self._versions, strict=True)
        return [t for t, version in both if version_of(t) != version and id(t) not in self._copies]

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
        tables = list(chain.from_iterable(map(_TABLES, held)))
        before = list(map(dict.copy, tables))
        are_training = list(map(_IS_TRAINING, held))
        are_trained = list(map(_IS_TRAINED, self._tensors))
        patches = [{key: now[key] for key in then if key in now} for now, then in self._patches]
        try:
            for (attributes, then), now in zip(self._patches, patches, strict=True):
                attributes.update((key, then[key]) for key in now)
            self._switch(held, self._are_training, self._are_trained)
            fill(tables, self._tables_then(before))
            yield
        finally:
            for (attributes, _), now in zip(self._patches, patches, strict=True):
                attributes.update(now)
            fill(tables, before)
            self._switch(held, are_training, are_trained)

    def _check(self) -> None:
        written = self._written()
        changed = f"{self._name_of(written[0])} was changed in place" if written else ""
        if self._look is not None and not changed:
            now = look_at(map(vars, self._modules))
            other = change(self._look, now._replace(counts=self._look.counts), self._state.names)
            changed = other and f"{other} was changed"
        if changed:
            raise SavedTensorModifiedError(
                f"{self._state.name} has to run again in backward (checkpoint_every, mlp_tiles), "
                f"and {changed} after its forward. Run backward before the optimizer steps, or "
                "give checkpoint_every=0 and mlp_tiles='off'.",
                key="changed-before-second-run",
            )

    def _name_of(self, tensor: Tensor) -> str:
        for at, tables in enumerate(zip(self._parameters, self._buffers, strict=True)):
            for name, each in chain.from_iterable(map(dict.items, tables)):
                if each is tensor:
                    return path_of(self._state.names, at, name)
        return "a tensor"

    def _tables_then(self, now: list[Table]) -> Iterator[Table]:
        """Yield tables as they were: parameters, buffers by turns, with copies of what is written.

        Parameters are those of *now* where an engine shards them.
        """
        for then, live, buffers in zip(self._parameters, now[::2], self._buffers, strict=True):
            yield {
                name: then[name] if _is_plain(each) and _is_plain(then.get(name)) else each
                for name, each in live.items()
            }
            yield {
                name: each if (copy := self._copies.get(id(each))) is None else copy.clone()
                for name, each in buffers.items()
            }

    def _switch(
        self, held: list[dict[str, Any]], are_training: list[bool], are_trained: list[bool]
    ) -> None:
        """Make the training flags of modules and parameters what is given."""
        for attributes, is_training in zip(held, are_training, strict=True):
            attributes["training"] = is_training
        train(self._tensors, are_trained)


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


def fill(tables: Iterable[Table], wanted: Iterable[Table]) -> None:
    """Make each of *tables* hold what is *wanted*."""
    for table, others in zip(tables, wanted, strict=True):
        if not have_same([table], [others]):
            table.clear()
            table.update(others)


def _is_plain(parameter: Tensor | None) -> bool:
    """Say whether *parameter* is neither sharded nor a view of what is."""
    is_known = type(parameter) in (Tensor, Parameter)
    return is_known and parameter is not None and not isinstance(parameter._base, Parameter)
