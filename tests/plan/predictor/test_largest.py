"""The searches for the largest size that fits."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hf_pyao.plan.predictor.largest import (
    largest_fitting,
    largest_on_a_line,
)


def made_up_peak(seed: int) -> tuple[Callable[[int], int], int, int | None]:
    """Return a growing peak that may bend once, a limit, and where sizes end."""
    draw = random.Random(seed)
    base, each = draw.randint(0, 10**9), draw.randint(10**5, 10**9)
    bend, at = draw.choice([0.0, 0.0, 0.3 * draw.random()]), draw.randint(1, 50)

    def peak(size: int) -> int:
        return int(base + each * (size - bend * max(0, size - at)))

    return peak, draw.randint(10**6, 10**11), draw.choice([None, draw.randint(1, 300)])


@pytest.mark.parametrize("search", [largest_fitting, largest_on_a_line])
def test_it_is_the_largest_and_was_asked_for(search: Callable[..., int]) -> None:
    num_asked = []
    for seed in range(500):
        peak, limit, most = made_up_peak(seed)
        asked: list[int] = []

        def counted(size: int) -> int:
            asked.append(size)
            return peak(size)

        found = search(counted, limit, most=most)
        assert found == 0 or (found in asked and peak(found) <= limit)
        assert most is None or found <= most
        slack = 0 if search is largest_fitting else 1
        beyond = found + 1 + slack
        assert (most is not None and beyond > most) or peak(beyond) > limit, seed
        num_asked.append(len(set(asked)))
    assert max(num_asked) <= 10


def test_a_size_that_fits_already_spares_peaks_that_are_dear() -> None:
    for seed in range(300):
        peak, limit, most = made_up_peak(seed)
        found = largest_on_a_line(peak, limit, most=most)
        for known in {found, max(0, found - 3), 0}:
            asked: list[int] = []

            def counted(size: int) -> int:
                asked.append(size)
                return peak(size)

            again = largest_on_a_line(counted, limit, most=most, at_least=known)
            assert known <= again
            assert peak(again) <= limit or again == 0
            assert abs(again - found) <= 1
            assert all(size == 1 or size >= min(known, 4) for size in asked)
        assert largest_on_a_line(lambda size: limit + 1, limit, most=most, at_least=5) == 5


def test_sizes_that_are_likely_are_asked_for_first_and_little_beyond_them() -> None:
    for seed in range(300):
        peak, limit, most = made_up_peak(seed)
        found = largest_on_a_line(peak, limit, most=most)
        for likely in ([1, 33], [8, max(1, found)], [max(1, found - 1)], [2 * found + 1]):
            asked: list[int] = []

            def counted(size: int) -> int:
                asked.append(size)
                return peak(size)

            again = largest_on_a_line(counted, limit, most=most, likely=likely, slack=1 / 64)
            assert (again == 0 and peak(1) > limit) or peak(again) <= limit
            assert abs(again - found) <= 1 + found / 64
            assert asked[0] == min(*likely, most or likely[0])
            assert len(set(asked)) <= 8


@pytest.mark.parametrize("likely", [(), (1, 128)])
def test_peaks_that_lie_on_no_line_end_the_search_soon(likely: tuple[int, ...]) -> None:
    """They jump by up to a half, so that what fits is not monotone, and far up at one size."""
    for seed in range(300):
        draw = random.Random(seed)
        base, each, limit = draw.randint(0, 10**6), draw.randint(1, 1000), 10**7
        jumps = [draw.choice([0.0, 0.0, 0.5 * draw.random()]) for _ in range(97)]
        cliff = draw.randint(1, 10_000)

        def peak(size: int) -> int:
            grown = base + each * size * (1 + jumps[size % 97])
            return int(grown if size < cliff else 100 * grown)

        asked: set[int] = set()

        def counted(size: int) -> int:
            asked.add(size)
            return peak(size)

        found = largest_on_a_line(counted, limit, likely=likely, slack=1 / 128)
        assert found == 0 or peak(found) <= limit
        assert len(asked) <= 40
