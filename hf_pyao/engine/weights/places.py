"""Where modules have streamed weights, and what is there while their layer runs.

[Note: Exchanged places]
Between forwards a module has its parameter, on the host. While the forward or the backward of its
layer runs, the tensor on the device is in its place. Whoever has put something else there keeps it.
All of this can be undone at any time, however far it had come.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class Place:
    """An attribute of a module that is exchanged.

    Args:
        module: held weakly.
        name: of the attribute.
        is_meant: says of what is there whether it is to be exchanged; of None, if there is nothing.
        make: makes what is there on the device, once its block is there.
        is_parameter: it is in the module's table of parameters; else a plain attribute.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        is_meant: Callable[[object], bool],
        make: Callable[[], object],
        *,
        is_parameter: bool = True,
    ) -> None:
        self._module = weakref.ref(module)
        self._name = name
        self._is_meant = is_meant
        self._make = make
        self._is_parameter = is_parameter
        self._on_host: Any = None
        self._on_device: Any = None

    def put_in(self) -> None:
        """Put there what is on the device."""
        table = self._table()
        found = table.get(self._name)
        if self._is_meant(found):
            self._on_host = found
            self._on_device = self._make()
            table[self._name] = self._on_device

    def take_out(self) -> None:
        """Undo :meth:`put_in`. It may be called again."""
        if self._on_device is not None:
            table = self._table()
            found = table.get(self._name)
            if found is self._on_device or _are_over_the_same(found, self._on_device):
                if self._on_host is None:
                    del table[self._name]
                else:
                    table[self._name] = self._on_host
        self._on_host = self._on_device = None

    def _table(self) -> dict[str, Any]:
        module = self._module()
        if module is None:
            return {}
        return module._parameters if self._is_parameter else module.__dict__


def keeper_of(layer: nn.Module, key: int) -> str:
    """Return the path of an attribute in *layer* that is a tensor over a storage; empty for none.

    Args:
        layer: its modules' parameters are not looked at.
        key: by which the storage is known.
    """
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if name == "_parameters":
                continue
            for each, held in _inside(name, value):
                if isinstance(held, torch.Tensor) and _key_of(held) == key:
                    return f"{path}.{each}" if path else each
    return ""


def _are_over_the_same(found: object, given: object) -> bool:
    """Say whether *found* is a view of *given*: PEFT sets a weight to itself on its device."""
    if not (isinstance(found, torch.Tensor) and isinstance(given, torch.Tensor)):
        return False
    return _key_of(found) == _key_of(given) != 0


def _inside(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield what an attribute holds, each under the name to tell of it; buffers have their own."""
    if isinstance(value, dict):
        yield from ((key if name == "_buffers" else name, each) for key, each in value.items())
    elif isinstance(value, list | tuple):
        yield from ((name, each) for each in value)
    else:
        yield name, value


def _key_of(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # it has none
        return 0
