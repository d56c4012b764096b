"""Exchanging a method of a module for as long as something is attached to it.

[Note: Lasting forwards] What stands for the method knows its module by its argument alone, and
finds its handle in the module's ``__dict__``: a deep copy of the module, in which the handle is
None, runs the weights of the copy, and so does an unpickled one, where hf_pyao need not be
installed. What the module had before is written down first, so that an interrupt between two steps
leaves something that can be recognised and taken back. If other code puts a method of its own
around ours, that stays: ours then only passes calls on.
"""

from __future__ import annotations

import abc
import inspect
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import nn

Method = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_PREVIOUS = "_pyao_previous_"
_KEYS = "_pyao_handles_"
_IS_OURS = "_is_pyao_forward"


class LeftBehind(abc.ABC):
    """What answers for a module's method; copies and pickles of it are None."""

    @abc.abstractmethod
    def run(self, module: nn.Module, own: Method, args: Args, kwargs: Kwargs) -> Any:
        """Return what a call of the method returns; *own* is the method that was there before."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model is a plain model: its methods find no handle."""
        return None

    def __reduce__(self) -> Any:
        # None, by a function that returns its second argument: a pickled model must load where
        # hf_pyao is not installed.
        return typing.cast, (None, None)


HandleT = TypeVar("HandleT", bound=LeftBehind)


class Exchanged(Generic[HandleT]):
    """Methods of modules that one part of an attachment has exchanged. Holds the modules weakly.

    Args:
        key: under which modules keep their handles.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._all: list[tuple[weakref.ref[nn.Module], HandleT]] = []

    def put(self, module: nn.Module, handle: HandleT) -> None:
        """Let calls of *module*'s forward go to *handle*."""
        self._all.append((weakref.ref(module), handle))  # first: see [Note: Lasting forwards]
        exchange(module, self._key, handle)

    def replace(self, other: Callable[[HandleT], HandleT]) -> None:
        """Exchange each handle for another one."""
        before = [(module, handle) for ref, handle in self._all if (module := ref()) is not None]
        self.take_back()
        for module, handle in before:
            self.put(module, other(handle))

    def take_back(self) -> None:
        """Give the modules their forwards back. Harmless if done already, wholly or in part."""
        while self._all:
            ref, handle = self._all[-1]
            if (module := ref()) is not None:
                give_back(module, self._key, handle)
            self._all.pop()


def exchange(module: nn.Module, key: str, handle: LeftBehind, name: str = "forward") -> None:
    """Let calls of *module*'s method *name* go to *handle*, which is kept under *key*.

    Of several handles the one that came last is called first; its own method is the one before.
    """
    module.__dict__[key] = handle
    keys = module.__dict__.get(_KEYS + name, ())
    module.__dict__[_KEYS + name] = (*(each for each in keys if each != key), key)
    if is_exchanged(module, name):
        return
    previous = module.__dict__[_PREVIOUS + name] = module.__dict__.get(name)
    method = _make(name, inspect.signature(getattr(module, name)), previous)
    module.__dict__[name] = types.MethodType(method, module)


def give_back(module: nn.Module, key: str, handle: LeftBehind, name: str = "forward") -> None:
    """Undo :func:`exchange`, wholly or in part done. Below somebody's method ours stays."""
    if module.__dict__.get(key, handle) is not handle:
        return
    module.__dict__.pop(key, None)
    keys = tuple(each for each in module.__dict__.get(_KEYS + name, ()) if each != key)
    if keys:
        module.__dict__[_KEYS + name] = keys
        return
    module.__dict__.pop(_KEYS + name, None)
    function = getattr(module.__dict__.get(name), "__func__", None)
    if getattr(function, _IS_OURS, False):
        previous = module.__dict__.get(_PREVIOUS + name)
        if previous is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = previous
    if not is_exchanged(module, name):
        module.__dict__.pop(_PREVIOUS + name, None)


def is_exchanged(module: nn.Module, name: str = "forward") -> bool:
    """Whether calls of the method come through one of ours, wrapped by others or not.

    What it had before is written down first. So if that is there and the module has another method,
    ours is below it; and if the module has that very one, ours is not there (any more).
    """
    method = module.__dict__.get(name)
    return _PREVIOUS + name in module.__dict__ and method is not module.__dict__[_PREVIOUS + name]


def leads_to_class(module: nn.Module, method: object, name: str = "forward") -> bool:
    """Whether *method*, which *module* has by itself, is ours, put on the method of the class."""
    is_ours = getattr(getattr(method, "__func__", None), _IS_OURS, False)
    return is_ours and module.__dict__.get(_PREVIOUS + name) is None


def _above(handle: LeftBehind, module: nn.Module, own: Method) -> Method:
    """Return the method that another handle finds below it, where *handle* is."""
    return lambda *args, **kwargs: handle.run(module, own, args, kwargs)


def _make(name: str, own: inspect.Signature, previous: Method | None) -> Method:
    """Return the function that becomes the method; see [Note: Lasting forwards]."""
    before, keys = _PREVIOUS + name, _KEYS + name

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        attributes = self.__dict__
        wrapped = attributes.get(before)
        # In these few lines compilers follow; compiled code runs what was there before.
        present = () if torch.compiler.is_compiling() else attributes.get(keys, ())
        handles = [attributes[key] for key in present if attributes.get(key) is not None]
        if handles:
            own_method = wrapped or types.MethodType(getattr(type(self), name), self)
            for handle in handles[:-1]:
                own_method = _above(handle, self, own_method)
            return handles[-1].run(self, own_method, args, kwargs)
        if wrapped is not None:
            return wrapped(*args, **kwargs)
        return getattr(type(self), name)(self, *args, **kwargs)

    annotated: Any = method
    setattr(annotated, _IS_OURS, True)
    annotated.__name__ = name  # by which a bound method is pickled
    # Trainer and generate() read the signature.
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    annotated.__signature__ = own.replace(parameters=[first, *own.parameters.values()])
    if previous is not None:
        # accelerate takes its autocast wrapper off by following this.
        annotated.__wrapped__ = previous
    return annotated  # type: ignore[no-any-return]
