"""Loops over parts of equal size that a step runs: chunks of a loss, blocks of rows."""

from __future__ import annotations

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
