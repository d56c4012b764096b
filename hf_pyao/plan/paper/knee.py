"""The knee of a sweep: the budget behind which more memory saved costs clearly more throughput.

The definition is Kneedle's (Satopaa et al., "Finding a 'Kneedle' in a Haystack"): with memory and
throughput scaled to the range that they take, the knee is the point farthest above the chord from
the point of least memory to that of most throughput. It is preferred to "the largest budget within
x % of the best" because that finds a budget on any curve, a straight line too, and its place is
the x: nothing about the curve makes it a knee.

Points that another one beats in both memory and throughput are left out first, so that a curve
that goes up and down is read by its better edge. A bend counts only where it stands out of the
noise; where there is none, the answer says why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

LEAST_FALL = 0.01
"""Share of the best throughput that must be lost at the least memory: less is a flat curve."""

LEAST_BEND = 0.05
"""Share of that loss by which a knee must be above the chord: less is a straight line."""


class Point(NamedTuple):
    """A budget's figures."""

    memory_bytes: float
    tokens_per_s: float


class Knee(NamedTuple):
    """What was found."""

    position: int | None
    """Of the point among those given; None if there is no knee."""
    reason: str
    """Why this one, or why none: the end of a sentence."""


def find_knee(points: Sequence[Point], noise_tokens_per_s: float = 0.0) -> Knee:
    """Find the knee.

    Args:
        points: one for each budget, in any order; those that are no numbers are passed over.
        noise_tokens_per_s: differences in throughput up to this one say nothing.
    """
    known = [
        (point, index) for index, point in enumerate(points) if all(math.isfinite(x) for x in point)
    ]
    if len(known) < 3:
        return Knee(None, f"a bend takes three budgets with figures, and there are {len(known)}")
    least = min(point.memory_bytes for point, _ in known)
    if least == max(point.memory_bytes for point, _ in known):
        return Knee(None, "no budget changes the memory")
    front = _front(known)
    best, last = front[-1][0], front[0][0]
    fall = best.tokens_per_s - last.tokens_per_s
    threshold = max(noise_tokens_per_s, LEAST_FALL * best.tokens_per_s)
    if fall <= threshold:
        return Knee(
            None,
            f"what the least memory costs, {fall:,.1f} of {best.tokens_per_s:,.1f} tokens/s, is "
            f"nothing that can be told: {_what(noise_tokens_per_s, threshold)}",
        )
    if len(front) < 3:
        return Knee(None, "all other budgets are beaten in memory and throughput by the two ends")
    return _farthest(front, fall, noise_tokens_per_s)


def _front(known: Sequence[tuple[Point, int]]) -> list[tuple[Point, int]]:
    """Return the points that no other beats in both, by rising memory and throughput."""
    front: list[tuple[Point, int]] = []
    for point, index in sorted(known, key=lambda k: (k[0].memory_bytes, -k[0].tokens_per_s)):
        if not front or point.tokens_per_s > front[-1][0].tokens_per_s:
            front.append((point, index))
    return front


def _farthest(front: Sequence[tuple[Point, int]], fall: float, noise: float) -> Knee:
    """Return the point of *front* that is farthest above the chord between its ends."""
    last, best = front[0][0], front[-1][0]
    width = best.memory_bytes - last.memory_bytes
    gaps = [
        point.tokens_per_s
        - (last.tokens_per_s + fall * (point.memory_bytes - last.memory_bytes) / width)
        for point, _ in front
    ]
    threshold = max(noise, LEAST_BEND * fall)
    gap, index = max(zip(gaps, (index for _, index in front), strict=True))
    if gap > threshold:
        return Knee(
            index,
            f"it is {gap:,.1f} tokens/s above the straight line from the least memory to the best "
            f"throughput, farther than any other, and {_what(noise, threshold)}",
        )
    if -min(gaps) > threshold:
        return Knee(None, "the first budgets cost most: the curve lies below its chord")
    return Knee(
        None,
        f"the curve is a straight line: no budget is more than {max(gap, 0.0):,.1f} tokens/s above "
        f"it, and {_what(noise, threshold)}",
    )


def _what(noise: float, threshold: float) -> str:
    """Say what a difference is measured by."""
    if noise >= threshold:
        return f"differences up to {noise:,.1f} are noise"
    return f"less than {threshold:,.1f} counts as none"
