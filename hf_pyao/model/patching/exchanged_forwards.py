"""Exchanging the ``forward`` of modules for the length of one call.

[Note: Exchanged forwards] While a thread runs a training forward, calls of the head (and of a tied
embedding) have to end with us. The module's ``forward`` is then a dispatcher that asks which thread
is calling: one that has exchanged it gets its answer, any other the module's own forward.

An interrupt may come between any two lines. Therefore each exchange is recorded before it is made.
Taking back follows the record, and may be done twice. :meth:`ExchangedForwards.during` takes back
twice, in case the first time was interrupted. There is no lock, since an interrupt could leave it
locked.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from torch import nn

from hf_pyao.model.patching.lasting_forward import leads_to_class

Forward = Callable[..., Any]

_Answers = tuple[tuple[nn.Module, Forward], ...]
"""Modules whose calls a thread answers, and how; the latest last."""

_MISSING = object()


class ExchangedForwards:
    """Forwards that answer calls of modules for a while; see [Note: Exchanged forwards]."""

    def __init__(self) -> None:
        self._answers: dict[int, _Answers] = {}  # by thread
        self._touched: dict[nn.Module, None] = {}  # what may have to be taken back

    @property
    def is_active(self) -> bool:
        """Whether a thread has exchanged forwards, the calling one or another."""
        return bool(self._answers)

    @property
    def answers(self) -> _Answers:
        """What the calling thread has exchanged."""
        return self._answers.get(get_ident(), ())

    def answers_for(self, module: nn.Module) -> bool:
        """Whether a thread has exchanged the forward of *module*."""
        several = list(self._answers.values())
        return any(module is answered for answers in several for answered, _ in answers)

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
        before = self.answers
        try:
            try:
                self._set((*before, *answers))
                return call(*args, **kwargs)
            finally:
                self._set(before)
        finally:
            self._set(before)

    def clear(self) -> None:
        """Take everything back, whichever thread exchanged it."""
        for answers in list(self._answers.values()):
            self._touched.update((module, None) for module, _ in answers)
        self._answers.clear()
        self._set(())

    def _set(self, answers: _Answers) -> None:
        """Let this thread answer calls by *answers*, and by nothing else."""
        self._touched.update((module, None) for module, _ in (*self.answers, *answers))
        if answers:
            self._answers[get_ident()] = answers
        else:
            self._answers.pop(get_ident(), None)
        for module in list(self._touched):
            if self.answers_for(module):
                self._exchange(module)
            else:
                self._restore(module)
                self._touched.pop(module, None)

    def _exchange(self, module: nn.Module) -> None:
        forward = module.__dict__.get("forward", _MISSING)
        if not self._is_ours(forward):
            module.__dict__["forward"] = _Dispatcher(module, forward, self)

    def _restore(self, module: nn.Module) -> None:
        forward = module.__dict__.get("forward", _MISSING)
        if not self._is_ours(forward):
            return  # not exchanged (any more), or below somebody's
        while isinstance(forward, _Dispatcher) and not forward.exchanged.answers_for(module):
            forward = forward.previous
        if forward is _MISSING:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = forward

    def _is_ours(self, forward: Any) -> bool:
        return isinstance(forward, _Dispatcher) and forward.exchanged is self


class _Dispatcher:
    """Is the ``forward`` of *module*, in the place of *previous*, while *exchanged* has it."""

    def __init__(self, module: nn.Module, previous: Any, exchanged: ExchangedForwards) -> None:
        self.previous = previous
        self.exchanged = exchanged
        self._module = module
        self._own = own_forward(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for module, answer in reversed(self.exchanged.answers):
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


def runs_forward_of_its_class(module: nn.Module) -> bool:
    """Whether a call of *module* ends in its class's ``forward``, with nothing but ours between."""
    forward = _own_entry(module)
    return forward is _MISSING or leads_to_class(module, forward)


def _own_entry(module: nn.Module) -> Any:
    forward = module.__dict__.get("forward", _MISSING)
    while isinstance(forward, _Dispatcher):
        forward = forward.previous
    return forward
