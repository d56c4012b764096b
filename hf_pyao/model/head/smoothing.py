"""Label smoothing that is asked for from outside a model, for losses that one thread computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass


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
    """The smoothing that each thread has asked for."""

    def __init__(self) -> None:
        self._asked: ContextVar[Smoothing | None] = ContextVar("smoothing", default=None)

    @contextlib.contextmanager
    def opened(self, epsilon: float) -> Iterator[Smoothing]:
        """Open a context within which this thread's losses are smoothed by *epsilon*."""
        smoothing = Smoothing(epsilon)
        before = self._asked.set(smoothing)
        try:
            yield smoothing
        finally:
            self._asked.reset(before)

    def current(self) -> Smoothing | None:
        """Return what this thread has asked for."""
        return self._asked.get()
