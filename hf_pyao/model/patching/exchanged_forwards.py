"""Exchanging the ``forward`` of modules for the length of one call.

[Note: Exchanged forwards] While a thread runs a training forward, calls of the head (and of a tied
embedding) have to end with us. The module's ``forward`` is then a dispatcher that asks which thread
is calling: one that has exchanged it gets its answer, any other the module's own forward. So
several threads can use one model at a time.

An interrupt may come between any two lines. Therefore each exchange is recorded before it is made.
Taking back follows the record, may be done twice, and finishes what another call has begun.
:meth:`ExchangedForwards.during` takes back twice, in case the first time was interrupted. There is
no lock, since an interrupt could leave it locked. A thread first writes its own request (its
answers), then makes the module's ``forward`` agree with the requests of all threads, and repeats
that as long as requests have changed meanwhile: the last thread sees those of the others.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from torch import nn

from hf_pyao.model.patching.lasting_forward import leads_to_class

Forward = Callable[..., Any]

_Answers = dict[int, tuple[tuple[nn.Module, Forward], ...]]
"""Thread -> modules whose calls it answers, and how; the latest last."""

_MISSING = object()


class ExchangedForwards:
    """Forwards that answer calls of modules for a while; see [Note: Exchanged forwards]."""

    def __init__(self) -> None:
        self._answers: _Answers = {}
        self._touched: dict[nn.Module, None] = {}  # what may have to be taken back

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
        before = self._answers.get(get_ident(), ())
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
        self._agree()

    def _set(self, answers: tuple[tuple[nn.Module, Forward], ...]) -> None:
        """Let this thread answer calls by *answers*, and by nothing else."""
        self._touched.update((module, None) for module, _ in answers)
        if answers:
            self._answers[get_ident()] = answers
        else:
            self._answers.pop(get_ident(), None)
        self._agree()

    def _agree(self) -> None:
        """Make every touched module's ``forward`` what all threads together want."""
        for module in list(self._touched):
            is_wanted = self._is_wanted(module)
            while True:
                if is_wanted:
                    self._touched[module] = None
                    self._exchange(module)
                else:
                    self._restore(module)
                    self._touched.pop(module, None)
                was_wanted, is_wanted = is_wanted, self._is_wanted(module)
                if was_wanted == is_wanted:
                    break

    def _is_wanted(self, module: nn.Module) -> bool:
        return any(
            module is answered
            for answers in list(self._answers.values())
            for answered, _ in answers
        )

    def _exchange(self, module: nn.Module) -> None:
        forward = module.__dict__.get("forward", _MISSING)
        if not self._is_ours(forward):
            module.__dict__["forward"] = _Dispatcher(module, forward, self._answers)

    def _restore(self, module: nn.Module) -> None:
        forward = module.__dict__.get("forward", _MISSING)
        if not self._is_ours(forward):
            return  # not exchanged (any more), or below somebody's
        while isinstance(forward, _Dispatcher) and not forward.answers_any():
            forward = forward.previous
        if forward is _MISSING:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = forward

    def _is_ours(self, forward: Any) -> bool:
        return isinstance(forward, _Dispatcher) and forward.answers is self._answers


class _Dispatcher:
    """Is the ``forward`` of *module*, in the place of *previous*, while *answers* has it."""

    def __init__(self, module: nn.Module, previous: Any, answers: _Answers) -> None:
        self.previous = previous
        self.answers = answers
        self._module = module
        self._own = own_forward(module)

    def answers_any(self) -> bool:
        """Whether any thread has asked for calls of the module to come here."""
        several = list(self.answers.values())
        return any(self._module is module for answers in several for module, _ in answers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for module, answer in reversed(self.answers.get(get_ident(), ())):
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
