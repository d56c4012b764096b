"""Loops over parts of equal size that a step runs: chunks of a loss, blocks of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

Part = TypeVar("Part")

NUM_SHOWN = 3
"""Parts that are run of a loop in a recorded step: first, second and last. The second stands for
those between."""


class Loop(NamedTuple):
    """Rows that are taken in parts, one after the other."""

    num_rows: int
    most_rows: int
    """Most rows of a part."""
    multiple: int = 0
    """Parts have nearly the same number of rows, a multiple of this. 0: all have
    :attr:`most_rows`, but the last."""

    @property
    def part_rows(self) -> int:
        """Rows of every part but the last."""
        if self.multiple:
            return even_rows(self.num_rows, self.most_rows, self.multiple)
        return max(1, min(self.most_rows, self.num_rows))

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return -(-self.num_rows // self.part_rows)

    @property
    def last_rows(self) -> int:
        """Rows of the last part."""
        return self.num_rows - (self.num_parts - 1) * self.part_rows

    def slices(self) -> Iterator[tuple[int, int]]:
        """Yield ``(start, stop)`` for each part; whoever records is told."""
        return repeated(slices_of(self.num_rows, self.part_rows), loop=self)


Listener = Callable[[Sequence[Any], Loop | None, Callable[[Any], object] | None], Iterator[Any]]
"""Takes what :func:`repeated` takes, and yields the parts that are to run."""

_LISTENERS: list[Listener] = []


def repeated(
    parts: Sequence[Part],
    *,
    loop: Loop | None = None,
    size_of: Callable[[Part], object] | None = None,
) -> Iterator[Part]:
    """Yield *parts*, which are alike; whoever records a step is told, and may run few of them.

    Args:
        parts: of a loop.
        loop: what decides the parts; None: it is no :class:`Loop`.
        size_of: the size of a part; None: all but the last have one size.
    """
    return _LISTENERS[-1](parts, loop, size_of) if _LISTENERS else iter(parts)


@contextlib.contextmanager
def told_of_parts(listener: Listener) -> Iterator[None]:
    """Let *listener* say which parts of loops run, for the whole process, inside this context."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


def slices_of(num_rows: int, part_rows: int) -> list[tuple[int, int]]:
    """Return ``(start, stop)`` of parts with *part_rows* rows each, but the last with the rest."""
    starts = range(0, num_rows, part_rows)
    return [(start, min(start + part_rows, num_rows)) for start in starts]


def even_rows(num_rows: int, most_rows: int, multiple: int) -> int:
    """Return how many rows a part has, so that all but the last have as many, and that nearly.

    Args:
        num_rows: in all.
        most_rows: of a part.
        multiple: what a part has a multiple of, if there are several.
    """
    if num_rows <= most_rows:
        return max(1, num_rows)
    num_parts = -(-num_rows // most_rows)
    even = -(-num_rows // num_parts)
    return min(most_rows, -(-even // multiple) * multiple)
