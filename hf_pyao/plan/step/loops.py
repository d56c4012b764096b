"""Loops over parts of equal size that a step runs: chunks of a loss, blocks of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

Part = TypeVar("Part")

NUM_SHOWN = 3
"""Parts that are run of a loop in a recorded step: first, second and last. The second stands for
those between."""


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


def slices_of(num_rows: int, part_rows: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` of parts with *part_rows* rows each, but the last with the rest."""
    starts = range(0, num_rows, part_rows)
    return repeated([(start, min(start + part_rows, num_rows)) for start in starts])


Listener = Callable[[Sequence[Any], Callable[[Any], object] | None], Iterator[Any]]
"""Takes what :func:`repeated` takes, and yields the parts that are to run."""

_LISTENERS: list[Listener] = []


def repeated(
    parts: Sequence[Part], size_of: Callable[[Part], object] | None = None
) -> Iterator[Part]:
    """Yield *parts*, which are alike; whoever records a step is told, and may run few of them.

    Args:
        parts: of a loop.
        size_of: the size of a part; None: all but the last have one size.
    """
    return _LISTENERS[-1](parts, size_of) if _LISTENERS else iter(parts)


@contextlib.contextmanager
def told_of_parts(listener: Listener) -> Iterator[None]:
    """Let *listener* say which parts of loops run, for the whole process, inside this context."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)
