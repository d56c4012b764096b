"""The knee of a sweep: found where there is one, and refused, with the reason, where not."""

from __future__ import annotations

import math
import random

import pytest

from hf_pyao.plan.paper.knee import Point, find_knee

MIB = 2**20


def _curve(throughputs: list[float]) -> list[Point]:
    """Return points whose memory falls by 10 MiB from each to the next."""
    return [Point((500 - 10 * k) * MIB, tokens) for k, tokens in enumerate(throughputs)]


def test_a_known_knee_is_found() -> None:
    knee = find_knee(_curve([1000, 999, 998, 997, 996, 900, 800, 700, 600]))
    assert knee.position == 4
    assert "above the straight line" in knee.reason


@pytest.mark.parametrize("bend", [1, 3, 6])
def test_it_is_where_two_lines_meet(bend: int) -> None:
    throughputs = [1000 - (2 * k if k <= bend else 2 * bend + 60 * (k - bend)) for k in range(9)]
    assert find_knee(_curve([float(value) for value in throughputs])).position == bend


def test_the_order_of_points_does_not_matter() -> None:
    points = _curve([1000, 999, 998, 997, 996, 900, 800, 700, 600])
    order = list(range(len(points)))
    random.Random(3).shuffle(order)
    found = find_knee([points[number] for number in order]).position
    assert found is not None
    assert order[found] == 4


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        (_curve([1000.0 - 50 * k for k in range(9)]), "a straight line"),
        (_curve([1000, 999, 1001, 998, 1000]), "costs, 1.0 of 1,001.0 tokens/s, is nothing"),
        (_curve([1000, 1010, 1020, 1100]), "what the least memory costs, 0.0 of 1,100.0 tokens/s"),
        (_curve([1000, 700, 650, 620, 600]), "the first budgets cost most"),
        (_curve([1000, 500, 500, 600]), "by the two ends"),
        ([Point(1.0, tokens) for tokens in (3.0, 2.0, 1.0)], "no budget changes the memory"),
        (_curve([1000, 500]), "there are 2"),
        ([], "there are 0"),
    ],
)
@pytest.mark.sampled(every=1)
def test_a_curve_without_a_knee_says_why(points: list[Point], reason: str) -> None:
    knee = find_knee(points)
    assert knee.position is None
    assert reason in knee.reason


def test_a_bend_within_the_noise_has_none() -> None:
    throughputs = [1000.0, 990, 980, 960, 900, 850]
    assert find_knee(_curve(throughputs), noise_tokens_per_s=5).position is not None
    knee = find_knee(_curve(throughputs), noise_tokens_per_s=60)
    assert knee.position is None
    assert "60.0 are noise" in knee.reason


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_has_none(seed: int) -> None:
    """Flat, and straight with a slope; the noise that is told is twice its standard deviation."""
    draw = random.Random(seed)
    flat = [1000 + draw.gauss(0, 20) for _ in range(12)]
    # Of twelve draws the two farthest apart are about 3.3 standard deviations from each other.
    assert find_knee(_curve(flat), noise_tokens_per_s=5 * 20).position is None
    line = [1000 - 25 * k + draw.gauss(0, 10) for k in range(12)]
    assert find_knee(_curve(line), noise_tokens_per_s=5 * 10).position is None


def test_a_curve_that_goes_up_and_down_is_read_by_its_better_edge() -> None:
    smooth = [1000.0, 999, 998, 997, 996, 900, 800, 700, 600]
    rough = [*smooth]
    rough[1], rough[3] = 850, 900  # beaten by budgets that save more and are faster
    assert find_knee(_curve(rough)).position == find_knee(_curve(smooth)).position == 4


def test_points_without_figures_are_passed_over() -> None:
    points = _curve([1000, 999, 998, 997, 996, 900, 800, 700, 600])
    points.insert(0, Point(math.nan, 5.0))
    assert find_knee(points).position == 5
    assert find_knee([Point(1.0, math.nan)] * 9).position is None


def test_neurocache_s_own_sweep_has_none() -> None:
    """Its Table 2: k = 10 saves most and costs 0.7 %, and k = 5 is beaten in both by k = 10."""
    table = {
        **{0: (2545.6, 1898.2), 1: (2527.6, 1888.1), 2: (2509.6, 1860.4), 3: (2491.6, 1888.5)},
        **{4: (2473.6, 1866.3), 5: (2455.6, 1878.6), 6: (2437.6, 1866.0), 8: (2401.6, 1872.1)},
        10: (2365.6, 1885.4),
    }
    knee = find_knee([Point(memory * MIB, tokens) for memory, tokens in table.values()])
    assert knee.position is None
    assert "costs, 12.8 of 1,898.2 tokens/s, is nothing that can be told" in knee.reason
