"""Label smoothing that is asked for from outside a model, for losses that one thread computes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from threading import get_ident
from types import TracebackType


@dataclass
class Smoothing:
    """Label smoothing that is asked for from outside the model."""

    epsilon: float
    """Share of each target that is spread evenly over the vocabulary."""
    applied: bool = False
    """Whether a loss has had it."""

    def note_applied(self) -> None:
        """Note that a loss has it."""
        self.applied = True


class Smoothings:
    """The smoothing that each thread has asked for.

    The contexts are known weakly: one whose end was interrupted ends with its ``with`` statement.
    """

    def __init__(self) -> None:
        self._open: weakref.WeakValueDictionary[int, _Context] = weakref.WeakValueDictionary()

    def opened(self, epsilon: float) -> _Context:
        """Return a context within which this thread's losses are smoothed by *epsilon*."""
        return _Context(self._open, epsilon)

    def current(self) -> Smoothing | None:
        """Return what this thread has asked for."""
        context = self._open.get(get_ident())
        return None if context is None else context.smoothing


class _Context:
    """Opened by ``with``; yields its :class:`Smoothing`."""

    def __init__(
        self, contexts: weakref.WeakValueDictionary[int, _Context], epsilon: float
    ) -> None:
        self.smoothing = Smoothing(epsilon)
        self._contexts = contexts
        self._outer: _Context | None = None

    def __enter__(self) -> Smoothing:
        self._outer = self._contexts.get(get_ident())
        self._contexts[get_ident()] = self
        return self.smoothing

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._outer is None:
            self._contexts.pop(get_ident(), None)
        else:
            self._contexts[get_ident()] = self._outer
        self._outer = None
