"""Weights that are more than one plain tensor: quantised ones, and those of tensor classes.

- bitsandbytes' linear layers (NF4, FP4, int8) compute with a packed weight and with scales, which
  are attributes of the weight (4 bit) or of the module (8 bit). Small tables (the code book, the
  offset of nested scales) are copied to the device once. The library's autograd functions keep the
  weight on the backward node; the ring has its bytes there again before the node runs.
- Tensor classes, as torchao's, say by ``__tensor_flatten__`` which plain tensors they have (packed
  data, scales, zero points), and make an object anew from others of the same kind: torch's protocol
  of traceable wrapper subclasses (``torch.utils._python_dispatch``).

The plain tensors are streamed. While a layer runs, its modules have a parameter of the same class
over their views on the device; the parameter itself stays on the host, where ``state_dict`` finds
it. bitsandbytes' classes are told by name: nothing is imported that is not there already.
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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_pyao.engine.transfer.layout import has_storage
from hf_pyao.training_engines import package_of

_LIBRARY = "bitsandbytes"


class PackedWeight(abc.ABC):
    """One parameter of a module that is streamed as several tensors."""

    tensors: tuple[tuple[str, torch.Tensor], ...]
    """Name and tensor of each; the parameter itself is without a name."""
    has_state = False
    """The module's ``state`` refers to the tensors, too."""
    may_be_repacked = False
    """The module may exchange the bytes of what stands for the parameter."""

    def __init__(self, module: nn.Module, parameter: Parameter) -> None:
        self._module = weakref.ref(module)
        self._parameter = weakref.ref(parameter)

    @property
    def module(self) -> Any:
        """The linear layer; None once it is gone."""
        return self._module()

    @property
    def parameter(self) -> Any:
        """What is streamed, on the host; None once it is gone."""
        return self._parameter()

    def move_tables(self, device: torch.device) -> None:
        """Copy to *device* what a stand-in has beside :attr:`tensors`."""
        return  # there is nothing to do for most kinds

    def follow(self) -> None:
        """Let the module refer to the parameter's memory, which has just changed."""
        return  # there is nothing to do for most kinds

    @abc.abstractmethod
    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a parameter like the one that is streamed over *tensors*, on the device."""

    def state_of(self, tensors: Sequence[torch.Tensor]) -> object:
        """Return the module's ``state`` over *tensors*; None: it has none."""
        return None


class FourBitWeight(PackedWeight):
    """A ``Params4bit``: its scales are in a ``QuantState``."""

    may_be_repacked = True

    def __init__(self, module: nn.Module, parameter: Any) -> None:
        super().__init__(module, parameter)
        state = self._state = parameter.quant_state
        nested = (("nested_absmax", state.state2.absmax),) if state.nested else ()
        self.tensors = ("", parameter), ("absmax", state.absmax), *nested
        self._tables = _tables_of(state)

    def move_tables(self, device: torch.device) -> None:
        """Copy the code books, and the offset of nested scales, to *device*."""
        self._tables = {name: each.to(device) for name, each in _tables_of(self._state).items()}

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a ``Params4bit`` of the same settings over packed weight and scales."""
        packed, absmax, *nested = tensors
        tables = dict(self._tables)
        code = tables.pop("nested_code", None)
        if nested:
            tables["state2"] = _copy_with(self._state.state2, absmax=nested[0], code=code)
        parameter = self.parameter
        stand_in: torch.Tensor = type(parameter)(
            packed,
            requires_grad=False,
            quant_state=_copy_with(self._state, absmax=absmax, **tables),
            blocksize=parameter.blocksize,
            compress_statistics=parameter.compress_statistics,
            quant_type=parameter.quant_type,
            quant_storage=parameter.quant_storage,
            bnb_quantized=True,
        )
        return stand_in


class EightBitWeight(PackedWeight):
    """An ``Int8Params`` of a ``Linear8bitLt``, whose ``state`` refers to weight and scales."""

    has_state = True

    def __init__(self, module: Any, parameter: Any) -> None:
        super().__init__(module, parameter)
        scales = module.state.SCB if parameter.SCB is None else parameter.SCB
        self.tensors = ("", parameter), ("SCB", scales)

    def follow(self) -> None:
        """Let the module's state refer to the parameter's memory again."""
        module, parameter = self.module, self.parameter
        if module is None or parameter is None:
            return
        if parameter.CB is not None:
            module.init_8bit_state()  # as its first forward does
        module.state.CB = parameter.data

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return an ``Int8Params`` over the packed weight."""
        kind = type(self.parameter)
        made: torch.Tensor = kind(tensors[0], requires_grad=False, has_fp16_weights=False)
        return made

    def state_of(self, tensors: Sequence[torch.Tensor]) -> object:
        """Return a state of the module over weight and scales."""
        return _copy_with(self.module.state, CB=tensors[0], SCB=tensors[1])


class FlattenedWeight(PackedWeight):
    """A parameter of a traceable wrapper subclass, which is made of plain tensors."""

    def __init__(self, module: nn.Module, parameter: Any) -> None:
        super().__init__(module, parameter)
        names, self._context = parameter.__tensor_flatten__()
        self.tensors = tuple((name, getattr(parameter, name)) for name in names)

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return an object like the parameter over *tensors*."""
        parameter: Any = self.parameter
        inner = {name: each for (name, _), each in zip(self.tensors, tensors, strict=True)}
        made: torch.Tensor = type(parameter).__tensor_unflatten__(
            inner, self._context, parameter.size(), parameter.stride()
        )
        return made


def packed_weight(module: nn.Module, parameter: Parameter) -> PackedWeight | None:
    """Return what streams *parameter* by its tensors; None if it is not of a known kind.

    One that is made of plain tensors must be on the host: the object's own device cannot be changed
    later.
    """
    held: Any = parameter
    if type(parameter) is Parameter:
        return None
    if package_of(type(module)) == _LIBRARY:
        kind = _kind_of(parameter)
        if kind == "Params4bit" and getattr(held, "quant_state", None) is not None:
            return FourBitWeight(module, held)
        if kind == "Int8Params" and not held.has_fp16_weights:
            state: Any = getattr(module, "state", None)
            if held.SCB is not None or (state is not None and state.SCB is not None):
                return EightBitWeight(module, held)
    if not is_traceable_wrapper_subclass(held) or parameter.device.type != "cpu":
        return None
    weight = FlattenedWeight(module, held)
    parts = [tensor for _, tensor in weight.tensors]
    keys = {tensor.untyped_storage()._cdata for tensor in parts if type(tensor) is torch.Tensor}
    is_streamable = len(keys) == len(parts) and all(
        has_storage(tensor) and tensor.numel() and not tensor.requires_grad for tensor in parts
    )
    return weight if parts and is_streamable else None


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


def _tables_of(state: Any) -> dict[str, torch.Tensor]:
    """Return code book, and of nested scales offset and code book."""
    if not state.nested:
        return {"code": state.code}
    return {"code": state.code, "offset": state.offset, "nested_code": state.state2.code}
