"""Finds the largest size that fits, with few recordings."""

from __future__ import annotations

from collections.abc import Callable


def largest_fitting(
    peak_bytes: Callable[[int], int],
    limit_bytes: int,
    *,
    most: int | None = None,
    at_least: int = 0,
) -> int:
    """Return the largest size whose peak is within *limit_bytes*; 0 if even 1 is not.

    Asks *peak_bytes* for it, and for the next one (unless it is *most*). Peaks grow with the size,
    almost in proportion: guesses are on the line through the two nearest peaks known, and in the
    middle of what is left where that has gained little.

    Args:
        peak_bytes: the peak at a size.
        limit_bytes: what it may be.
        most: the largest size that there is; None: there is no such.
        at_least: a size that is known to fit.
    """
    left = max(1, at_least)
    known = {left: peak_bytes(left)}
    if known[left] > limit_bytes:
        return at_least
    if left == most:
        return left
    right = 4 if left < 4 else left + max(1, left // 16)
    right = right if most is None else min(right, most)
    known[right] = peak_bytes(right)
    least = right
    while known[right] <= limit_bytes:
        if right == most:
            return right
        slope = max(1.0, (known[right] - known[left]) / (right - left))
        guess = right + int((limit_bytes - known[right]) / slope) + 1
        left, right = right, min(max(guess, least), 16 * right)
        if most is not None:
            right = min(right, most)
        least = 2 * right  # a guess that still fits: peaks bend, and others would creep
        known[right] = peak_bytes(right)
    width = right - left
    while right - left > 1:
        slope = max(1.0, (known[right] - known[left]) / (right - left))
        guess = left + int((limit_bytes - known[left]) / slope)
        if 2 * (right - left) > width and right - left < width:
            guess = (left + right) // 2
        width = right - left
        guess = min(max(guess, left + 1), right - 1)
        known[guess] = peak_bytes(guess)
        left, right = (guess, right) if known[guess] <= limit_bytes else (left, guess)
    return left


def largest_on_a_line(
    peak_bytes: Callable[[int], int],
    limit_bytes: int,
    *,
    most: int | None = None,
    at_least: int = 0,
) -> int:
    """Return the largest size whose peak is within *limit_bytes*, by as few peaks as will do.

    As :func:`largest_fitting`, for peaks that are dear: the size that is returned was asked for,
    and fits; that the next one does not is said by the line through the nearest peaks known.
    Where *at_least* fits by other peaks alone, nothing beyond it is asked for.
    """
    fitting: list[tuple[int, int]] = []
    too_large: tuple[int, int] | None = None
    end = None if most is None else most + 1
    guess = 1
    while guess > (fitting[-1][0] if fitting else 0):
        peak = peak_bytes(guess)
        if peak <= limit_bytes:
            fitting.append((guess, peak))
        else:
            too_large, end = (guess, peak), guess
        if not fitting or (too_large is not None and too_large[0] <= at_least):
            return at_least
        left, left_peak = fitting[-1]
        if len(fitting) == 1 and too_large is None:
            guess = max(4, at_least)
        else:
            failed = too_large if peak > limit_bytes else None
            slope = _slope(fitting[-1], failed or fitting[-2]) or _slope(fitting[-1], fitting[0])
            guess = min(
                left + int((limit_bytes - left_peak) / (slope or 1.0)),
                (4 if left < 16 else 32) * left,
            )
        if end is not None:
            guess = min(guess, end - 1)
    return fitting[-1][0]


def _slope(one: tuple[int, int], other: tuple[int, int]) -> float:
    """Return by how much a peak grows with each size; 0 where it does not."""
    if one[0] == other[0]:
        return 0.0
    return max(0.0, (other[1] - one[1]) / (other[0] - one[0]))
