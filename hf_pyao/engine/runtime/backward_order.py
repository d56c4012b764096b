"""In which order backward comes to the layer calls of the forwards that wait for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from hf_pyao.engine.runtime.tape import LayerCall, Tape


class BackwardOrder(Protocol):
    """Says which forward's backward follows; inside a forward it is always the reverse of it.

    A wrong answer costs time, never gradients: what is brought back ahead is other than what is
    asked for next.
    """

    def next_forward(self, tape: Tape, waiting: Sequence[Tape]) -> Tape | None:
        """Return the forward whose backward follows that of *tape*, to be brought back ahead.

        Args:
            tape: the forward whose backward runs.
            waiting: those that wait for theirs, oldest first.

        Returns:
            One of *waiting*; None if none, or if that cannot be told.
        """
        ...

    def note_backward(self, tapes: Sequence[Tape]) -> None:
        """Record that a backward pass is over, and which forwards it went through."""
        ...


class Reversed:
    """The newest forward first, where backward passes go through several; the default.

    Where each forward had a backward pass of its own the last time, nothing is brought back beyond
    the forward that it runs through: which one comes next is not known.
    """

    def __init__(self, *, goes_on: bool = False) -> None:
        """Begin as if the last backward pass had gone through several forwards, if *goes_on*."""
        self._goes_on = goes_on

    def next_forward(self, tape: Tape, waiting: Sequence[Tape]) -> Tape | None:
        """Return the newest."""
        return waiting[-1] if self._goes_on and waiting else None

    def note_backward(self, tapes: Sequence[Tape]) -> None:
        """Learn whether backward passes go through several forwards."""
        self._goes_on = len(tapes) > 1


class OldestFirst:
    """The oldest forward first, as in 1F1B and GPipe schedules of pipelines."""

    def next_forward(self, tape: Tape, waiting: Sequence[Tape]) -> Tape | None:
        """Return the oldest."""
        return waiting[0] if waiting else None

    def note_backward(self, tapes: Sequence[Tape]) -> None:
        """Do nothing: the schedule is known."""


def calls_after(
    call: LayerCall, order: BackwardOrder, waiting: Sequence[Tape]
) -> Iterator[LayerCall]:
    """Yield the calls that backward comes to after *call*, as far as *order* tells."""
    seen: list[Tape] = []
    current: LayerCall | None = call
    tape = call.tape
    while True:
        while current is not None:
            if current is not call:
                yield current
            current = current.previous
        seen.append(tape)
        left = [each for each in waiting if each not in seen]
        following = order.next_forward(tape, left)
        if following is None or following in seen:
            return
        tape = following
        current = next(iter(reversed(list(tape.live_calls()))), None)
