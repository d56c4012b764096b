"""Modules of a model that read weights from a source instead of finding them on the device."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_pyao.engine.weights.tables import Source, put_on, take_off
from hf_pyao.model.patching.lasting_forward import (
    Args,
    Kwargs,
    LeftBehind,
    Method,
    exchange,
    give_back,
)
from hf_pyao.model.weights.places import StayingParameters


class Around(LeftBehind):
    """Runs a module's forward as *run* says, which gets the forward with its arguments."""

    def __init__(self, run: Callable[[Callable[[], Any]], Any]) -> None:
        self._run = run

    def run(self, module: nn.Module, own: Method, args: Args, kwargs: Kwargs) -> Any:
        """Return what the module's own forward returns."""
        return self._run(functools.partial(own, *args, **kwargs))


class WeightReaders:
    """What was put on modules so that they read weights elsewhere, until :meth:`take_off`.

    Args:
        is_elsewhere: says of a parameter whether its weight is not on the device. ``to()`` and the
            like leave it where it is.
        device: where compute reads the weights.
    """

    def __init__(self, is_elsewhere: Callable[[object], bool], device: torch.device) -> None:
        self._is_elsewhere = is_elsewhere
        self._staying = StayingParameters(is_elsewhere, device)
        self._modules: list[weakref.ref[nn.Module]] = []
        self._forwards: list[tuple[weakref.ref[nn.Module], str, Any]] = []

    def __bool__(self) -> bool:
        """Return whether any module reads weights elsewhere."""
        return bool(self._modules)

    def leave_on_host(self, model: nn.Module) -> None:
        """Have moves of *model* leave weights where they are that are elsewhere."""
        for module in model.modules():
            if any(map(self._is_elsewhere, list(module._parameters.values()))):
                self._modules.append(weakref.ref(module))
                self._staying.put_on(module)

    def put_on(
        self,
        model: nn.Module,
        reads: Callable[[object], bool],
        source_of: Callable[[nn.Module], Source],
    ) -> None:
        """Let each module of *model* read its weights from a source.

        Args:
            model: the whole model.
            reads: says which parameters are read there; modules without one stay as they are.
            source_of: returns the source of a module.
        """
        for module in model.modules():
            if any(map(reads, list(module._parameters.values()))):
                self._modules.append(weakref.ref(module))
                self._staying.put_on(module)
                put_on(module, source_of(module))

    def exchange(self, module: nn.Module, key: str, handle: Any) -> None:
        """Run *handle* in place of the forward of *module*; *key* is its own."""
        self._forwards.append((weakref.ref(module), key, handle))
        exchange(module, key, handle)

    def take_off(self) -> None:
        """Let modules find their parameters as before. It may be called again."""
        for ref, key, handle in self._forwards:
            if (module := ref()) is not None:
                give_back(module, key, handle)
        for owner in self._modules:
            if (module := owner()) is not None:
                self._staying.take_off(module)
                take_off(module)
        self._forwards, self._modules = [], []
