"""The parameter table of a module whose weights are streamed.

[Note: Tables]
``nn.Module`` finds parameters in ``_parameters``. In a module that owns streamed weights this table
is a dictionary of the same content, whose *look-up* of one name gives the weight on the device
while a layer's forward, or a backward pass, runs on the thread. Who goes through the table
(``parameters()``, ``state_dict()``, ``_apply``) finds the Parameter objects. So nothing is ever
exchanged in the table: an exception in mid-pass, or an interrupt, leaves it as it was. Code that
reads the weight of another module (as DoRA does), or runs a module again in backward, needs no
hook.

A copy of the module, and a pickled one, has a plain dictionary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from hf_pyao.engine.weights.castable import CastableView
from hf_pyao.engine.weights.ring import WeightRing
from hf_pyao.engine.weights.slot_view import SlotView


class StreamedTable(dict[str, Any]):
    """Parameters by name; those that are streamed are found on the device while they are used."""

    def __init__(self, parameters: dict[str, Parameter | None], ring: WeightRing) -> None:
        super().__init__(parameters)
        self._ring = ring

    def __getitem__(self, name: str) -> Any:
        """Return what the module's attribute *name* is now."""
        return self._ring.read(super().__getitem__(name))

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a parameter; what a look-up has given stands for the parameter itself.

        PEFT, for one, sets a quantised weight to itself on its device.
        """
        if isinstance(
            value, SlotView | CastableView
        ):  # as whoever exchanged the parameter for a while found it
            value = value.parameter
        if value is None or not self._ring.holds(value):
            super().__setitem__(name, value)

    def streamed(self) -> Iterator[tuple[Parameter, torch.device]]:
        """Yield those that are streamed, and the device on which they are read."""
        for parameter in dict.values(self):
            if parameter is not None and self._ring.weight_of(parameter) is not None:
                yield parameter, self._ring.device

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """Leave the copy a plain table."""
        return copy.deepcopy(dict(self), memo)

    def __copy__(self) -> dict[str, Any]:
        """Return a plain table."""
        return dict(self)

    def copy(self) -> dict[str, Any]:
        """Return a plain table."""
        return dict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the unpickled module a plain table."""
        return dict, (dict(self),)


def streamed_in(model: nn.Module) -> Iterator[tuple[Parameter, torch.device]]:
    """Yield each streamed parameter of *model*, and the device on which it is read."""
    for module in model.modules():
        table = module.__dict__["_parameters"]
        if isinstance(table, StreamedTable):
            yield from table.streamed()


def put_on(module: nn.Module, ring: WeightRing) -> None:
    """Let *module* find its streamed weights through *ring*."""
    module.__dict__["_parameters"] = StreamedTable(module._parameters, ring)


def take_off(module: nn.Module) -> None:
    """Give *module* a plain table again. It may be called again."""
    table = module.__dict__["_parameters"]
    if isinstance(table, StreamedTable):
        module.__dict__["_parameters"] = dict(table)
