"""Weights that bitsandbytes has quantised (NF4, FP4, int8), streamed together with their scales.

[Note: Weights on nodes]
bitsandbytes' linear layers compute with a packed weight and with scales, which are attributes of
the weight (4 bit) or of the module (8 bit). Its autograd functions keep both on the backward node,
and do not save them, so that no hook on saved tensors sees them. Hence, after the forward of such a
layer, what lies in a slot is taken off the node, and hooks of the node put it back for as long as
the node runs. Forward and backward are the library's own, with the bits of a resident run.

A stand-in for the parameter is of the parameter's class and has the scales on the device. Whoever
reads the weight inside of a layer gets one (adapters that merge, DoRA's norm); the parameter itself
stays on the host, where ``state_dict`` finds it. Small tables (the code book, the offset of nested
scales) are copied to the device once.

Classes are told by name: nothing is imported that is not there already.
"""

from __future__ import annotations

import abc
import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from hf_pyao.model.patching.lasting_forward import Args, Kwargs, LeftBehind, Method
from hf_pyao.training_engines import package_of

_LIBRARY = "bitsandbytes"
_NODES = frozenset({"MatMul4BitBackward", "MatMul8bitLtBackward", "MatMul8bitFpBackward"})
_MOST_NODES = 8
"""Nodes that are looked at behind an output: casts and reshapes come before the product."""

Give = Callable[[], torch.Tensor]


class Ring(Protocol):
    """The ring of streamed weights, as far as a quantised weight needs it."""

    def tensor_for(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the streamed *tensor* on the device; None outside of layers and of backward."""
        ...

    def standing_in(self, parameter: object, stand_in: torch.Tensor) -> Any:
        """Return a context in which *stand_in* is read in place of *parameter*."""
        ...

    def find(self, tensor: torch.Tensor) -> Give | None:
        """Return what gives *tensor* again, which lies in a slot; None if it does not."""
        ...


class QuantisedWeight(abc.ABC):
    """One quantised parameter of a module."""

    scales: tuple[tuple[str, torch.Tensor], ...]
    """Name and tensor of what travels with the packed weight."""

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
    def stand_in(self, packed: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a parameter like the one that is streamed.

        Args:
            packed: the weight on the device.
            scales: those of :attr:`scales`, in this order, on the device.
        """

    def run(self, own: Callable[[], Any], stand_in: torch.Tensor) -> Any:
        """Return what the module's own forward returns; it reads *stand_in*."""
        return own()

    @abc.abstractmethod
    def kept_by(self, node: Any) -> tuple[torch.Tensor, ...]:
        """Return what *node* keeps of the packed weight and of its scales; empty for nothing."""

    @abc.abstractmethod
    def put_on(self, node: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Let *node* keep *tensors*, in the order of :meth:`kept_by`."""

    @abc.abstractmethod
    def take_off(self, node: Any) -> None:
        """Let *node* keep none of them."""


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

    def stand_in(self, packed: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
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

    def kept_by(self, node: Any) -> tuple[torch.Tensor, ...]:
        """Return the packed weight and the scales."""
        packed = node.tensors[1] if getattr(node, "tensors", None) else None
        if packed is None or node.state is None:
            return ()
        state = node.state
        nested = (state.state2.absmax,) if state.nested else ()
        return (packed, state.absmax, *nested)

    def put_on(self, node: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Give the node the packed weight, and a state over the scales."""
        node.tensors = (None, tensors[0])
        node.state = self._state_over(tensors[1:])

    def take_off(self, node: Any) -> None:
        """Take both off."""
        node.tensors = (None, None)
        node.state = None

    def _state_over(self, scales: Sequence[torch.Tensor]) -> Any:
        code, offset, nested_code = self._tables
        state = _copy_with(self._state, absmax=scales[0], code=code)
        if not state.nested:
            return state
        nested = _copy_with(state.state2, absmax=scales[1], code=nested_code)
        return _copy_with(state, offset=offset, state2=nested)


class EightBitWeight(QuantisedWeight):
    """An ``Int8Params`` of a ``Linear8bitLt``, whose ``state`` refers to weight and scales."""

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

    def stand_in(self, packed: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return an ``Int8Params`` over *packed*."""
        parameter = self.parameter
        stand_in: Any = type(parameter)(packed, requires_grad=False, has_fp16_weights=False)
        stand_in.pyao_scales = tuple(scales)
        return stand_in  # type: ignore[no-any-return]

    def run(self, own: Callable[[], Any], stand_in: Any) -> Any:
        """Run with a state of the module that refers to the stand-in."""
        module = self.module
        state = module.state
        module.state = _copy_with(state, CB=stand_in.data, SCB=stand_in.pyao_scales[0])
        try:
            return own()
        finally:
            module.state = state

    def kept_by(self, node: Any) -> tuple[torch.Tensor, ...]:
        """Return the packed weight and the scales."""
        state = node.state
        return () if state is None or state.CB is None else (state.CB, state.SCB)

    def put_on(self, node: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Give the node a state over both."""
        module = self.module
        node.state = _copy_with(module.state, CB=tensors[0], SCB=tensors[1])

    def take_off(self, node: Any) -> None:
        """Take its state off."""
        node.state = None


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


class QuantisedForward(LeftBehind):
    """Runs a quantised linear layer over its weight in a slot; see [Note: Weights on nodes]."""

    def __init__(self, ring: Ring, weight: QuantisedWeight) -> None:
        self._ring = ring
        self._weight = weight

    def run(self, module: nn.Module, own: Method, args: Args, kwargs: Kwargs) -> Any:
        """Return what the module's own forward returns."""
        stand_in = self.stand_in()
        if stand_in is None:
            return own(*args, **kwargs)
        with self._ring.standing_in(self._weight.parameter, stand_in):
            output = self._weight.run(lambda: own(*args, **kwargs), stand_in)
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            node = _product_behind(output.grad_fn)
            if node is not None:
                self._let_go(node)
        return output

    def stand_in(self) -> torch.Tensor | None:
        """Return a parameter over the weight on the device; None outside of layers."""
        parameter = self._weight.parameter
        packed = None if parameter is None else self._ring.tensor_for(parameter)
        if packed is None:
            return None
        scales = [self._ring.tensor_for(scale) for _, scale in self._weight.scales]
        return self._weight.stand_in(packed, [each for each in scales if each is not None])

    def _let_go(self, node: Any) -> None:
        weight = self._weight
        gives = [self._ring.find(_plain(tensor)) for tensor in weight.kept_by(node)]
        found = [give for give in gives if give is not None]
        if not found or len(found) != len(gives):
            return  # nothing is kept, or not of a slot: then whoever keeps it keeps its bytes
        weight.take_off(node)
        ref = weakref.ref(node)  # the node owns its hooks

        def give_back(_: Any) -> None:
            if (running := ref()) is not None:
                weight.put_on(running, [give() for give in found])

        def let_go(*_: Any) -> None:
            if (running := ref()) is not None:
                weight.take_off(running)

        node.register_prehook(give_back)
        node.register_hook(let_go)


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


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if type(tensor) is torch.Tensor else tensor.detach().as_subclass(torch.Tensor)


def _product_behind(node: Any) -> Any:
    """Return the node of a quantised product whose output leads to *node* by casts alone."""
    for _ in range(_MOST_NODES):
        if node is None:
            return None
        if type(node).__name__ in _NODES:
            return node
        following = [other for other, _ in node.next_functions if other is not None]
        if len(following) != 1:
            return None
        node = following[0]
    return None
