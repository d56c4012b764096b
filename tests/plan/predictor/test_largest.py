"""The searches for the largest size that fits."""

from __future__ import annotations

import random
from collections.abc import Callable

from hf_pyao.plan.predictor.largest import largest_fitting


def made_up_peak(seed: int) -> tuple[Callable[[int], int], int, int | None]:
    """Return a growing peak that may bend once, a limit, and where sizes end."""
    draw = random.Random(seed)
    base, each = draw.randint(0, 10**9), draw.randint(10**5, 10**9)
    bend, at = draw.choice([0.0, 0.0, 0.3 * draw.random()]), draw.randint(1, 50)

    def peak(size: int) -> int:
        return int(base + each * (size - bend * max(0, size - at)))

    return peak, draw.randint(10**6, 10**11), draw.choice([None, draw.randint(1, 300)])


def test_it_is_the_largest_and_was_asked_for() -> None:
    num_asked = []
    for seed in range(500):
        peak, limit, most = made_up_peak(seed)
        asked: list[int] = []

        def counted(size: int) -> int:
            asked.append(size)
            return peak(size)

        found = largest_fitting(counted, limit, most=most)
        assert found == 0 or (found in asked and peak(found) <= limit)
        assert most is None or found <= most
        assert found == most or peak(found + 1) > limit, seed
        num_asked.append(len(set(asked)))
    assert max(num_asked) <= 11


def test_a_single_size_that_does_not_fit_ends_no_search() -> None:
    """Fragments may take more of 23 samples than of 24."""
    for odd in ({23}, {5, 23}, {1}, set()):
        found = largest_fitting(lambda size: 10 * size + 1000 * (size in odd), 265)
        assert found == (0 if odd == {1} else 26)
