"""Weights that bitsandbytes has quantised (NF4, FP4, int8), streamed together with their scales.

bitsandbytes' linear layers compute with a packed weight and with scales, which are attributes of
the weight (4 bit) or of the module (8 bit). While a layer runs, its modules have a parameter of the
same class over the block on the device; the parameter itself stays on the host, where
``state_dict`` finds it. The library's autograd functions keep the weight on the backward node; the
ring has its bytes there again before the node runs. Small tables (the code book, the offset of
nested scales) are copied to the device once.

Classes are told by name: nothing is imported that is not there already.
"""

from __future__ import annotations

import abc
import copy
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from hf_pyao.training_engines import package_of

_LIBRARY = "bitsandbytes"


class QuantisedWeight(abc.ABC):
    """One quantised parameter of a module."""

    scales: tuple[tuple[str, torch.Tensor], ...]
    """Name and tensor of what travels with the packed weight."""
    has_state = False
    """The module's ``state`` refers to weight and scales, too."""

    def __init__(self, module: nn.Module, parameter: Parameter) -> None:
        self._module = weakref.ref(module)
        self._parameter = weakref.ref(parameter)

    @property
    def module(self) -> Any:
        """The linear layer; None once it is gone."""
        return self._module()

    @property
    def parameter(self) -> Any:
        """Its packed weight, on the host; None once it is gone."""
        return self._parameter()

    def move_tables(self, device: torch.device) -> None:
        """Copy to *device* what a stand-in has beside the packed weight and its scales."""
        return  # there is nothing to do for most kinds

    def follow(self) -> None:
        """Let the module refer to the parameter's memory, which has just changed."""
        return  # there is nothing to do for most kinds

    @abc.abstractmethod
    def on_device(self, packed: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        """Return a parameter like the one that is streamed.

        Args:
            packed: the weight on the device.
            scales: those of :attr:`scales`, in this order, on the device.
        """

    def state_on_device(self, packed: torch.Tensor, *scales: torch.Tensor) -> object:
        """Return the module's ``state`` over these; None: it has none."""
        return None


class FourBitWeight(QuantisedWeight):
    """A ``Params4bit``: its scales are in a ``QuantState``."""

    def __init__(self, module: nn.Module, parameter: Any) -> None:
        super().__init__(module, parameter)
        state = self._state = parameter.quant_state
        scales = [("absmax", state.absmax)]
        if state.nested:
            scales.append(("nested_absmax", state.state2.absmax))
        self.scales = tuple(scales)
        self._tables = _tables_of(state)

    def move_tables(self, device: torch.device) -> None:
        """Copy the code books, and the offset of nested scales, to *device*."""
        self._tables = tuple(
            None if table is None else table.to(device) for table in _tables_of(self._state)
        )

    def on_device(self, packed: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        """Return a ``Params4bit`` of the same settings over *packed*."""
        parameter = self.parameter
        stand_in: torch.Tensor = type(parameter)(
            packed,
            requires_grad=False,
            quant_state=self._state_over(scales),
            blocksize=parameter.blocksize,
            compress_statistics=parameter.compress_statistics,
            quant_type=parameter.quant_type,
            quant_storage=parameter.quant_storage,
            bnb_quantized=True,
        )
        return stand_in

    def _state_over(self, scales: Sequence[torch.Tensor]) -> Any:
        code, offset, nested_code = self._tables
        state = _copy_with(self._state, absmax=scales[0], code=code)
        if not state.nested:
            return state
        nested = _copy_with(state.state2, absmax=scales[1], code=nested_code)
        return _copy_with(state, offset=offset, state2=nested)


class EightBitWeight(QuantisedWeight):
    """An ``Int8Params`` of a ``Linear8bitLt``, whose ``state`` refers to weight and scales."""

    has_state = True

    def __init__(self, module: Any, parameter: Any) -> None:
        super().__init__(module, parameter)
        scales = module.state.SCB if parameter.SCB is None else parameter.SCB
        self.scales = (("SCB", scales),)

    def follow(self) -> None:
        """Let the module's state refer to the parameter's memory again."""
        module, parameter = self.module, self.parameter
        if module is None or parameter is None:
            return
        if parameter.CB is not None:
            module.init_8bit_state()  # as its first forward does
        module.state.CB = parameter.data

    def on_device(self, packed: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        """Return an ``Int8Params`` over *packed*."""
        made: torch.Tensor = type(self.parameter)(
            packed, requires_grad=False, has_fp16_weights=False
        )
        return made

    def state_on_device(self, packed: torch.Tensor, *scales: torch.Tensor) -> object:
        """Return a state of the module over both."""
        return _copy_with(self.module.state, CB=packed, SCB=scales[0])


def quantised(module: nn.Module, parameter: Parameter) -> QuantisedWeight | None:
    """Return what streams *parameter*, if it is a quantised weight of a known kind; else None."""
    if type(parameter) is Parameter or package_of(type(module)) != _LIBRARY:
        return None
    kind = _kind_of(parameter)
    held: Any = parameter
    if kind == "Params4bit" and getattr(held, "quant_state", None) is not None:
        return FourBitWeight(module, held)
    if kind == "Int8Params" and not held.has_fp16_weights:
        state: Any = getattr(module, "state", None)
        if held.SCB is not None or (state is not None and state.SCB is not None):
            return EightBitWeight(module, held)
    return None


def _kind_of(parameter: Parameter) -> str:
    """Return the library's name for the class of *parameter*; empty for others.

    A step that is recorded on fake tensors has stand-ins, with the attributes of the class.
    """
    if isinstance(parameter, FakeTensor):
        attributes = vars(parameter)
        if "quant_state" in attributes:
            return "Params4bit"
        return "Int8Params" if "has_fp16_weights" in attributes else ""
    kind = type(parameter)
    return kind.__name__ if package_of(kind) == _LIBRARY else ""


def move_state(module: nn.Module, parameter: Parameter, device: torch.device) -> None:
    """Move to *device* what a quantised *parameter*, which stays there, has beside its tensor."""
    held: Any = parameter
    kind = type(parameter)
    if package_of(kind) != _LIBRARY:
        return
    if kind.__name__ == "Params4bit" and held.quant_state is not None:
        held.quant_state.to(device)
    elif kind.__name__ == "Int8Params":
        state: Any = getattr(module, "state", None)
        if held.CB is not None:
            held.CB, held.SCB = held.data, held.SCB.to(device)
        elif state is not None and state.CB is not None:
            state.CB, state.SCB = held.data, state.SCB.to(device)


def _copy_with(value: Any, **attributes: Any) -> Any:
    """Return a shallow copy of an object of the library's with other *attributes*."""
    other = copy.copy(value)
    for name, attribute in attributes.items():
        setattr(other, name, attribute)
    return other


def _tables_of(state: Any) -> tuple[torch.Tensor | None, ...]:
    """Return code book, offset and nested code book; without nested scales two of them are None."""
    if not state.nested:
        return state.code, None, None
    return state.code, state.offset, state.state2.code
