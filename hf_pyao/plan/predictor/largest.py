"""Finds the largest size that fits, with few recordings."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest size that fits; 0 if 1 does not. That the next does not was asked."""
    left, right = 0, min(1, most)
    while fits(right):
        left = right
        if left == most:
            break
        right = min(4 * right, most)
    while left < most and right - left > 1:
        middle = (left + right) // 2
        left, right = (middle, right) if fits(middle) else (left, middle)
    return left


def largest_fitting(
    peak_bytes: Callable[[int], int],
    limit_bytes: int,
    *,
    most: int | None = None,
    at_least: int = 0,
) -> int:
    """Return the largest size whose peak is within *limit_bytes*; 0 if even 1 is not.

    Asks *peak_bytes* for it, and for the next two (unless it is *most*): what an allocator reserves
    may be more for a single size than for the one above.

    Args:
        peak_bytes: the peak at a size.
        limit_bytes: what it may be.
        most: the largest size that there is; None: there is no such.
        at_least: a size that is known to fit.
    """
    found = _largest_between(peak_bytes, limit_bytes, most, at_least)
    while found and (most is None or found + 2 <= most) and peak_bytes(found + 2) <= limit_bytes:
        found = _largest_between(peak_bytes, limit_bytes, most, found + 2)
    return found


def _largest_between(
    peak_bytes: Callable[[int], int], limit_bytes: int, most: int | None, at_least: int
) -> int:
    """Return a size that fits where the next one does not.

    Peaks grow with the size, almost in proportion: guesses are on the line through the two nearest
    peaks known, and in the middle of what is left where that has gained little.
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
