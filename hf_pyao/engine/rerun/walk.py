"""The walk over all that an inventory notes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _NormBase

from hf_pyao.engine.rerun.kinds import DICT, Content, Kind, Kinds
from hf_pyao.engine.rerun.values import (
    MOST_HOLDERS,
    MOST_ITEMS,
    MOST_TENSOR_BYTES,
    Found,
    Holder,
    Loose,
    is_recorder,
)
from hf_pyao.engine.transfer.layout import has_storage

_HOOK_TABLES = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)
"""Names of the tables in which this package has hooks on modules, and flags of these."""


class Walk:
    """Finds all that is reached from some values.

    Args:
        kinds: of values, by their types.
    """

    def __init__(self, kinds: Kinds) -> None:
        self._found = Found()
        self._kinds = kinds
        self._seen: set[int] = set()
        self._pending: list[Any] = []

    def run(self, pending: list[Any]) -> Found:
        """Return what *pending* lead to; it is used up."""
        self._pending = pending
        kinds, seen, found = self._kinds, self._seen, self._found
        while pending:
            value = pending.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            kind = kinds[type(value)]
            if kind is Kind.MODULE:
                self._note_module(value)
            elif kind is Kind.OBJECT:
                self._note(value.__dict__, DICT)
            elif kind is Kind.TUPLE:
                self._look_at(enumerate(value), None)
            elif kind is Kind.CONTAINER:
                self._note(value, kinds.content(type(value)))
                if type(value).__dictoffset__ and value.__dict__:
                    self._note(value.__dict__, DICT)
            elif kind is Kind.GENERATOR:
                found.generators.append(value)
            if len(found.holders) > MOST_HOLDERS:
                found.unknown.append(value)
                break
        found.close()
        return found

    def _note_module(self, module: nn.Module) -> None:
        attributes = module.__dict__
        self._pending.extend(each for each in attributes["_modules"].values() if each is not None)
        is_statistic = isinstance(module, _NormBase) and module.track_running_stats
        self._found.hook_tables.update([id(attributes.get(name)) for name in _HOOK_TABLES])
        buffers = attributes["_buffers"]
        for tensor in buffers.values() if is_statistic else ():
            if type(tensor) is Tensor and id(tensor) not in self._seen:
                self._seen.add(id(tensor))
                self._found.tensors.append((tensor, True))
        self._note(attributes, DICT, buffers)

    def _note(self, holder: Any, content: Content, buffers: Any = None) -> None:
        copy = content.copy(holder)
        if buffers is not None and is_recorder(copy.get("forward")):
            copy["forward"] = copy["forward"].__wrapped__
        if content.is_counted and len(copy) > MOST_ITEMS:
            self._found.unknown.append(holder)
            return
        self._found.holders.append(Holder(holder, content, copy))
        if buffers is not None and buffers:
            self._seen.add(id(buffers))
            self._note_buffers(buffers)
        if type(copy) is dict:
            self._look_at(copy.items(), copy)
        else:
            self._look_at(enumerate(content.items(copy)), copy)

    def _note_buffers(self, buffers: dict[str, Any]) -> None:
        """Note a module's table of buffers: they are held, whatever their size."""
        self._found.holders.append(Holder(buffers, DICT, dict.copy(buffers)))
        for tensor in buffers.values():
            if type(tensor) is Tensor and id(tensor) not in self._seen:
                self._seen.add(id(tensor))
                self._found.tensors.append((tensor, False))

    def _look_at(self, items: Iterable[tuple[Any, Any]], copy: Any) -> None:
        kinds, found, pending = self._kinds, self._found, self._pending
        loose: list[tuple[Any, Loose]] = []
        for key, value in items:
            kind = kinds[type(value)]
            if kind is Kind.LEAF or kind is Kind.MODULE:
                continue
            if kind is Kind.CONTAINER:
                if not kinds.content(type(value)).is_counted or len(value):
                    pending.append(value)
                else:
                    found.empty.append(value)
            elif kind is Kind.PARAMETER:
                self._note_parameter(value)
            elif kind is Kind.TENSOR:
                made = self._note_tensor(value)
                if made is not None and copy is not None:
                    loose.append((key, made))
            elif kind is Kind.OPAQUE:
                found.unknown.append(value)
            elif kind is Kind.TUPLE and copy is not None:
                changed = self._loosened(value)
                if changed is not None:
                    loose.append((key, changed))
                pending.append(value)
            else:
                pending.append(value)
        for key, made in loose:
            copy[key] = made

    def _note_parameter(self, parameter: Parameter) -> None:
        if id(parameter) not in self._seen:
            self._seen.add(id(parameter))
            self._found.parameters.append(parameter)

    def _note_tensor(self, tensor: Tensor) -> Loose | None:
        """Note a tensor; return what stands for it if it is not to be held."""
        if tensor.requires_grad or (has_storage(tensor) and tensor.nbytes > MOST_TENSOR_BYTES):
            made = Loose(tensor)
            self._found.loose.append(made)
            return made
        if id(tensor) not in self._seen:
            self._seen.add(id(tensor))
            self._found.tensors.append((tensor, False))
        return None

    def _loosened(self, values: tuple[Any, ...]) -> Any:
        """Return a tuple without the tensors that are not to be held; None if there are none."""
        items: list[Any] = [(self._note_tensor(v) or v) if type(v) is Tensor else v for v in values]
        if all(a is b for a, b in zip(items, values, strict=True)):
            return None
        return type(values)(*items) if hasattr(values, "_fields") else tuple(items)
