"""Finds the largest size that fits, with few recordings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MOST_ON_A_LINE = 12
"""Peaks after which sizes are no longer looked for on a line: these peaks lie on none."""

OFF_THE_LINE = 1 / 64
"""Share of a peak by which it is off a line."""


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
    likely: Sequence[int] = (),
    slack: float = 0.0,
) -> int:
    """Return the largest size whose peak is within *limit_bytes*, by as few peaks as will do.

    As :func:`largest_fitting`, for peaks that are dear: the size that is returned was asked for,
    and fits; that the next one does not is said by the line through the nearest peaks known.
    Where *at_least* fits by other peaks alone, nothing beyond it is asked for.

    Args:
        peak_bytes: the peak at a size. It is asked again for sizes that are known, as what it says
            of them may have become better; whether they fit does not change.
        limit_bytes: what it may be.
        most: the largest size that there is; None: there is no such.
        at_least: a size that is known to fit.
        likely: sizes to ask for first, each if the one before it fits.
        slack: share of a size that fits within which larger ones are not asked for.
    """
    fitting: list[int] = []
    too_large, num_peaks = None, 0
    asked = iter(sorted({*likely} if likely else {1, max(4, at_least)}))
    guess = next(asked) if most is None else min(next(asked), most)
    while guess > (fitting[-1] if fitting else 0):
        num_peaks += 1
        if peak_bytes(guess) <= limit_bytes:
            fitting.append(guess)
        else:
            too_large = guess
        if too_large is not None and too_large <= at_least:
            break
        if not fitting:
            guess = 1
        elif too_large is None and (following := next(asked, 0)) > guess:
            guess = following
        elif num_peaks >= MOST_ON_A_LINE:
            guess = 2 * fitting[-1] if too_large is None else (fitting[-1] + too_large) // 2
        else:
            guess = _on_the_line(peak_bytes, limit_bytes, fitting, too_large, slack)
        if too_large is not None:
            guess = min(guess, too_large - 1)
        if most is not None:
            guess = min(guess, most)
    return max(fitting[-1], at_least) if fitting else at_least


def _on_the_line(
    peak_bytes: Callable[[int], int],
    limit_bytes: int,
    fitting: Sequence[int],
    too_large: int | None,
    slack: float,
) -> int:
    """Return where the line through the nearest peaks comes to the limit.

    Where that is within *slack* of the largest size that fits, and the next one that does not is
    far away or not known: a size a little beyond, as the peak of a single size may be off the line.
    """
    left = fitting[-1]
    others = fitting[-2::-1] if too_large is None else (too_large, *fitting[-2::-1])
    left_bytes = peak_bytes(left)
    slopes = ((peak_bytes(other) - left_bytes) / (other - left) for other in others)
    slope = next((each for each in slopes if each > 0), 1.0)
    guess = left + int((limit_bytes - left_bytes) / slope)
    if guess - left <= int(slack * left):
        is_far = too_large is None or too_large - left > left // 16
        return left + max(1, left // 32) if is_far and _is_off(peak_bytes, fitting) else left
    return guess if too_large is not None else min(guess, (4 if left < 16 else 32) * left)


def _is_off(peak_bytes: Callable[[int], int], fitting: Sequence[int]) -> bool:
    """Say whether the last peak is above the line through the two before; True without these."""
    if len(fitting) < 3:
        return True
    one, other, last = fitting[-3:]
    slope = (peak_bytes(other) - peak_bytes(one)) / (other - one)
    return peak_bytes(last) > (peak_bytes(other) + slope * (last - other)) * (1 + OFF_THE_LINE)
