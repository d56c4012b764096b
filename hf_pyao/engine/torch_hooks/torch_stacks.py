"""Removes entries from stacks of torch's that others push to as well.

[Note: Interrupts]
A signal's handler, and with it KeyboardInterrupt, may run between any two steps of Python. So the
package does not rely on records of its own to find what an interrupt left behind, but looks where
torch keeps it: it knows saved-tensor hooks by their pack function on autograd's stack, a trace by
its type on the stack of dispatch modes, and module hooks by their type in the modules'
dictionaries. Cleaning up consists of steps that may be repeated: code that is interrupted in it
does it again, and goes on raising. Where two steps must not be separated, one call into C does
both: no handler runs inside of one.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import methodcaller
from typing import Any, NamedTuple

_call = methodcaller("__call__")


class Stack(NamedTuple):
    """One of torch's stacks. Its functions are written in C: see [Note: Interrupts]."""

    top: Callable[[], Any]
    """Returns the topmost item; None if there is none."""
    pop: Callable[[], Any]
    """Takes the topmost item down."""
    lift: tuple[Callable[[], Any], ...]
    """Called one after the other, they take the topmost item down and one returns it; the others
    return None."""
    push_all: Callable[[Iterator[Any]], Iterable[object]]
    """Returns what pushes each item of an iterator when it is iterated over."""

    def take_out(self, is_meant: Callable[[Any], bool]) -> bool:
        """Take the topmost item that *is_meant* down; those above it stay on, in their order."""
        lifted: list[Any] = [None]
        is_found = False
        try:
            try:
                while not is_found and (item := self.top()) is not None:
                    is_found = is_meant(item)
                    if is_found:
                        self.pop()
                    else:
                        lifted.extend(filter(None, map(_call, self.lift)))
            finally:
                self._put_back(lifted)
        finally:
            self._put_back(lifted)  # should an interrupt have come before the first time
        return is_found

    @contextlib.contextmanager
    def emptied(self) -> Iterator[None]:
        """Take all items down for the length of this context."""
        lifted: list[Any] = [None]
        try:
            try:
                while self.top() is not None:
                    lifted.extend(filter(None, map(_call, self.lift)))
                yield
            finally:
                self._put_back(lifted)
        finally:
            self._put_back(lifted)  # as in `take_out`

    def _put_back(self, lifted: list[Any]) -> None:
        """Push what *lifted* lists above its first item, which is None; it is then empty."""
        if lifted:
            deque(self.push_all(iter(lifted.pop, None)), maxlen=0)
