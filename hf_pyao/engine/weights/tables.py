"""The parameter table of a module whose weights are read where a source says.

[Note: Tables]
``nn.Module`` finds parameters in ``_parameters``. In modules of zeroth order this table is a
dictionary of the same content, whose *look-up* of a name gives what its source reads on the device.
Who goes through the table (``parameters()``, ``state_dict()``, ``_apply``) finds the Parameter
objects. So nothing is ever exchanged in the table: an exception in mid-pass, or an interrupt,
leaves it as it was. Code that reads the weight of another module needs no hook.

A copy of the module, and a pickled one, has a plain dictionary.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import Parameter

READER = "_pyao_ends"
"""Key of what a module with a weight on demand has, whose ``source`` reads it."""


class Source(Protocol):
    """What brings weights to the device."""

    device: torch.device
    """Where compute reads the weights."""

    def streams(self, parameter: object) -> bool:
        """Say whether *parameter* is brought from the host."""
        ...

    def read(self, parameter: Parameter | None) -> torch.Tensor | None:
        """Return what a module's attribute gives where *parameter* is in its table."""
        ...

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether *tensor* lies in memory that weights are uploaded to."""
        ...


class StreamedTable(dict[str, Any]):
    """Parameters by name; those that are streamed are found on the device while they are used."""

    def __init__(self, parameters: dict[str, Parameter | None], source: Source) -> None:
        super().__init__(parameters)
        self.source = source

    def __getitem__(self, name: str) -> Any:
        """Return what the module's attribute *name* is now."""
        return self.source.read(super().__getitem__(name))

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a parameter; what a look-up has given stands for the parameter itself.

        PEFT, for one, sets a quantised weight to itself on its device.
        """
        if value is None or not self.source.holds(value):
            super().__setitem__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """Leave the copy a plain table."""
        return copy.deepcopy(self.copy(), memo)

    def __copy__(self) -> dict[str, Any]:
        """Return a plain table."""
        return self.copy()

    def copy(self) -> dict[str, Any]:
        """Return a plain table; weights that are trained on the way are up to date then."""
        flush = getattr(self.source, "flush", None)
        if flush is not None:
            flush()
        return dict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the unpickled module a plain table."""
        return dict, (self.copy(),)


@contextlib.contextmanager
def held_on_device(module: nn.Module) -> Iterator[None]:
    """Keep the weights of *module* that are uploaded when they are read until the end."""
    with contextlib.ExitStack() as stack:
        for each in module.modules():
            handle = each.__dict__.get(READER)
            if handle is not None:
                stack.enter_context(handle.source.held(each))
        yield


def put_on(module: nn.Module, source: Source) -> None:
    """Let *module* find its streamed weights through *source*."""
    module.__dict__["_parameters"] = StreamedTable(module._parameters, source)


def take_off(module: nn.Module) -> None:
    """Give *module* a plain table again. It may be called again."""
    table = module.__dict__["_parameters"]
    if isinstance(table, StreamedTable):
        module.__dict__["_parameters"] = dict(table)
