"""Loops over parts of equal size that a step runs: chunks of a loss, blocks of rows."""

from __future__ import annotations

from typing import NamedTuple

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
