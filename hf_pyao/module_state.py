"""What modules go by when they run: noted as a forward begins, put back where it runs again.

[Note: State of modules]
Between a forward and its backward, a script may freeze weights, call ``eval()``, put other weights
in (``torch.func.functional_call``) or take a method off; a forward itself may count its calls, or
draw from a generator of its own. None of this reaches what autograd has saved, so none may reach a
second run. Noted are parameters and whether they are trained, attributes that are plain values,
methods or small tensors, and the state of generators. Attributes that are lists, large tensors or
other objects are not: noting them would hold what they hold; nor is what is written into a tensor.
A second run leaves all attributes as they were before. Sharded parameters are left alone: those
who shard them have put the right ones there.
"""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

_PLAIN = frozenset(
    {bool, int, float, complex, str, type(None), torch.dtype, torch.device, types.MethodType}
)
_WHOLE = (Tensor, Parameter)
"""Types of parameters that nobody has sharded."""
_MOST_TENSOR_BYTES = 2**20
"""Attributes with larger tensors are not noted."""
_OURS = "_pyao_"
"""How the names of what this package puts on a module begin."""
_EVERY_MODULES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that torch gives every module: tables, which are not noted, but for parameters."""
_GONE = object()


def version_of(tensor: Tensor) -> int:
    """Return how often *tensor* was changed in place; 0 for one that does not count."""
    return 0 if tensor.is_inference() else tensor._version


class NotedParameter(NamedTuple):
    """A parameter where a module has it."""

    home: dict[str, Any]
    name: str
    tensor: Tensor
    requires_grad: bool
    version: int


class ModuleState:
    """That of *modules* at the moment; see [Note: State of modules].

    Args:
        modules: all of them, those inside of others too.
        also_global: take the generators of Python and numpy too that all share; not torch's.
    """

    def __init__(self, modules: Iterable[nn.Module], *, also_global: bool = False) -> None:
        kinds = _generator_kinds()
        self.parameters: list[NotedParameter] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._generators: list[tuple[Any, Any]] = []
        if also_global:
            self._generators += [(each, kinds[type(each)].get(each)) for each in _shared()]
        for module in modules:
            attributes = vars(module)
            noted = {}
            for name, value in attributes.items():
                if name in _EVERY_MODULES:
                    continue
                kind = type(value)
                if kind in _PLAIN or name.startswith(_OURS) or _is_small_tensor(value):
                    noted[name] = value
                elif kind in kinds:
                    self._generators.append((value, kinds[kind].get(value)))
            self._attributes.append((attributes, noted))
            home: dict[str, Any] = attributes["_parameters"]
            for name, tensor in home.items():
                if tensor is not None:
                    self.parameters.append(
                        NotedParameter(home, name, tensor, tensor.requires_grad, version_of(tensor))
                    )

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Have it hold inside of this context; what changes inside does not outlast it."""
        before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        with contextlib.ExitStack() as stack:
            stack.callback(_restore_all, before)
            for attributes, noted in self._attributes:
                before.append((attributes, dict(attributes)))
                _put_attributes(attributes, noted)
            for each in self.parameters:
                _put_parameter(each, stack)
            self._put_generators(stack)
            yield

    def drew(self) -> bool:
        """Say whether a generator has given numbers since."""
        kinds = _generator_kinds()
        return any(
            not _is_equal(kinds[type(generator)].get(generator), state)
            for generator, state in self._generators
        )

    def _put_generators(self, stack: contextlib.ExitStack) -> None:
        kinds = _generator_kinds()
        for generator, state in self._generators:
            kind = kinds[type(generator)]
            stack.callback(kind.set, generator, kind.get(generator))
            kind.set(generator, state)


def _is_small_tensor(value: Any) -> bool:
    if type(value) is not Tensor or value.layout is not torch.strided:
        return False
    return not value.requires_grad and value.nbytes <= _MOST_TENSOR_BYTES


class _GeneratorKind(NamedTuple):
    get: Callable[[Any], Any]
    set: Callable[[Any, Any], None]


def _generator_kinds() -> dict[type, _GeneratorKind]:
    """Return how the state of each kind of generator is read and written."""
    kinds: dict[type, _GeneratorKind] = {
        torch.Generator: _GeneratorKind(torch.Generator.get_state, _set_torch),
        random.Random: _GeneratorKind(random.Random.getstate, random.Random.setstate),
    }
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        kinds[numpy.Generator] = _GeneratorKind(_state_of_numpy, _set_numpy)
        kinds[numpy.RandomState] = _GeneratorKind(_state_of_old_numpy, _set_old_numpy)
    return kinds


def _shared() -> list[Any]:
    """Return the generators behind the functions of ``random`` and ``numpy.random``."""
    numpy: Any = sys.modules.get("numpy.random")
    found = [random.random, *([numpy.get_state] if numpy is not None else [])]
    return [function.__self__ for function in found]


def _set_torch(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _state_of_numpy(generator: Any) -> Any:
    return generator.bit_generator.state


def _set_numpy(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state


def _state_of_old_numpy(generator: Any) -> Any:
    return generator.get_state(legacy=False)


def _set_old_numpy(generator: Any, state: Any) -> None:
    generator.set_state(state)


def _is_equal(left: Any, right: Any) -> bool:
    """Compare two states of a generator."""
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    return str(left) == str(right)  # numpy's have arrays in them


def _put_attributes(attributes: dict[str, Any], noted: dict[str, Any]) -> None:
    for name, value in noted.items():
        if attributes.get(name, _GONE) is not value:
            attributes[name] = value
    for name in attributes.keys() - noted.keys() - _EVERY_MODULES:
        if _is_method(name, attributes[name]):
            del attributes[name]  # put on since


def _restore_all(before: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for attributes, values in reversed(before):
        _restore(attributes, values)


def _restore(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        # What somebody took away inside, who moves parameters about, is to stay away.
        if attributes.get(name, _GONE) is not value and (
            name in attributes or _is_method(name, value)
        ):
            attributes[name] = value
    for name in attributes.keys() - before.keys():
        if _is_method(name, attributes[name]):
            del attributes[name]


def _is_method(name: str, value: Any) -> bool:
    return type(value) is types.MethodType or name.startswith(_OURS)


def _put_parameter(each: NotedParameter, stack: contextlib.ExitStack) -> None:
    home, name, tensor = each.home, each.name, each.tensor
    now = home.get(name)
    if now is not tensor and type(tensor) in _WHOLE and type(now) in _WHOLE:
        stack.callback(home.__setitem__, name, now)
        home[name] = tensor
    if tensor.requires_grad != each.requires_grad and tensor.is_leaf:
        stack.callback(tensor.requires_grad_, tensor.requires_grad)
        tensor.requires_grad_(each.requires_grad)
