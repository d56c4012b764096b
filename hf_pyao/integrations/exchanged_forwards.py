"""Exchanging the ``forward`` of modules for the length of one call.

[Note: Exchanged forwards] While a thread runs a training forward, calls of the head (and of a tied
embedding) have to end with us. The module's ``forward`` is then a dispatcher that asks which thread
is calling: one that has exchanged it gets its answer, any other the module's own forward. So
several threads can use one model at a time.

An interrupt may come between any two lines. Therefore what is exchanged is written down before it
is; taking back goes by what is written down, may be done twice, and finishes what another one has
begun; and :meth:`ExchangedForwards.during` does it twice, the second time in case that the first
was interrupted.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from torch import nn

Forward = Callable[..., Any]

_MISSING = object()


class ExchangedForwards:
    """Forwards that answer calls of modules for a while; see [Note: Exchanged forwards]."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[int, list[tuple[nn.Module, Forward]]] = {}  # by thread
        self._dispatchers: dict[nn.Module, _Dispatcher] = {}  # all that are to be taken back

    @property
    def num_active(self) -> int:
        """Forwards that this thread has exchanged."""
        return len(self._answers.get(get_ident(), ()))

    def during(
        self, answers: Sequence[tuple[nn.Module, Forward]], call: Forward, *args: Any, **kwargs: Any
    ) -> Any:
        """Return ``call(*args, **kwargs)``, made while *answers* stand for their modules' forwards.

        Args:
            answers: modules, and what calls of them in this thread run instead.
            call: what is called.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        before = self.num_active
        try:
            try:
                self._exchange(answers)
                return call(*args, **kwargs)
            finally:
                self._take_back(before)
        finally:
            self._take_back(before)

    def clear(self) -> None:
        """Take everything back, whichever thread exchanged it."""
        with self._lock:
            self._answers.clear()
            self._restore_unused()

    def _exchange(self, answers: Sequence[tuple[nn.Module, Forward]]) -> None:
        with self._lock:
            self._answers.setdefault(get_ident(), []).extend(answers)
            for module, _ in answers:
                if module not in self._dispatchers:
                    self._dispatchers[module] = _Dispatcher(module, self._answers)
                module.__dict__["forward"] = self._dispatchers[module]

    def _take_back(self, num_left: int) -> None:
        """Drop what this thread has exchanged after the first *num_left*."""
        with self._lock:
            answers = self._answers.get(get_ident(), [])
            del answers[num_left:]
            if not answers:
                self._answers.pop(get_ident(), None)
            self._restore_unused()

    def _restore_unused(self) -> None:
        used = {module for answers in self._answers.values() for module, _ in answers}
        for module in [module for module in self._dispatchers if module not in used]:
            dispatcher = self._dispatchers[module]
            dispatcher.is_over = True
            if module.__dict__.get("forward") is dispatcher:
                previous = dispatcher.previous
                while isinstance(previous, _Dispatcher) and previous.is_over:
                    previous = previous.previous
                if previous is _MISSING:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = previous
            del self._dispatchers[module]


class _Dispatcher:
    """Is the ``forward`` of *module* while any thread has exchanged it."""

    def __init__(
        self, module: nn.Module, answers: dict[int, list[tuple[nn.Module, Forward]]]
    ) -> None:
        self.previous = module.__dict__.get("forward", _MISSING)
        self.is_over = False
        self._own = own_forward(module)
        self._module = module
        self._answers = answers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for module, answer in reversed(self._answers.get(get_ident(), ())):
            if module is self._module:
                return answer(*args, **kwargs)
        return self._own(*args, **kwargs)


def own_forward(module: nn.Module) -> Forward:
    """Return the ``forward`` that *module* has when none of ours stands for it."""
    forward = _own_entry(module)
    return types.MethodType(type(module).forward, module) if forward is _MISSING else forward


def has_forward_of_its_own(module: nn.Module) -> bool:
    """Whether others than us have given this instance a ``forward`` that is not its class's."""
    return _own_entry(module) is not _MISSING


def _own_entry(module: nn.Module) -> Any:
    forward = module.__dict__.get("forward", _MISSING)
    while isinstance(forward, _Dispatcher):
        forward = forward.previous
    return forward
