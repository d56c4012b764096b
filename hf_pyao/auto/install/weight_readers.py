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
from hf_pyao.model.weights.places import STAYING, StayingParameters


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
        self._staying = StayingParameters(is_elsewhere, device)
        self._exchanged: list[tuple[weakref.ref[nn.Module], str, Any, str]] = []

    def __bool__(self) -> bool:
        """Return whether any module reads weights elsewhere."""
        return any(key == STAYING for _, key, _, _ in self._exchanged)

    def put_on(
        self,
        model: nn.Module,
        reads: Callable[[object], bool],
        source_of: Callable[[nn.Module], Source] | None = None,
    ) -> None:
        """Have moves of *model* leave its weights where they are, and let modules read them there.

        Args:
            model: the whole model.
            reads: says which parameters are read there; modules without one stay as they are.
            source_of: returns what a module reads them from; None: weights are left where they are,
                and read in other ways.
        """
        for module in model.modules():
            if any(map(reads, list(module._parameters.values()))):
                self.exchange(module, STAYING, self._staying, "_apply")
                if source_of is not None:
                    put_on(module, source_of(module))

    def exchange(self, module: nn.Module, key: str, handle: Any, name: str = "forward") -> None:
        """Run *handle* in place of a method of *module*; *key* is its own."""
        self._exchanged.append((weakref.ref(module), key, handle, name))
        exchange(module, key, handle, name)

    def take_off(self) -> None:
        """Let modules find their parameters as before. It may be called again."""
        for ref, key, handle, name in self._exchanged:
            if (module := ref()) is not None:
                give_back(module, key, handle, name)
                take_off(module)
        self._exchanged = []
