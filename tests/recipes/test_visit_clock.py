"""On the virtual clock a zeroth-order step takes as long as its busiest lane."""

from __future__ import annotations

import pytest

from experiments.visit_clock import VisitClock, VisitTimes, least_step_ms


def step_ms(blocks: list[VisitTimes], num_slots: int = 2) -> float:
    clock = VisitClock(blocks, num_slots)
    clock.step_ms()
    return clock.step_ms()


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("offload_ms", [1.0, 3.0])
@pytest.mark.parametrize("upload_ms", [1.0, 3.0])
@pytest.mark.parametrize("compute_ms", [1.0, 3.0, 10.0])
@pytest.mark.sampled(every=5)
def test_a_step_is_its_busiest_lane_and_one_fill_and_drain(
    compute_ms: float, upload_ms: float, offload_ms: float, is_packed: bool
) -> None:
    blocks = [VisitTimes(compute_ms, upload_ms, offload_ms, 0.1 * compute_ms)] * 24
    fill_and_drain = max(b.upload_ms for b in blocks) + max(b.offload_ms for b in blocks)
    least = least_step_ms(blocks)
    clock = VisitClock(blocks, is_packed=is_packed)
    for _ in range(3):
        assert 0.99 * least <= clock.step_ms() <= 1.02 * (least + fill_and_drain)


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_first_upload_is_hidden_by_the_step_before_unless_weights_are_packed(
    is_packed: bool,
) -> None:
    clock = VisitClock([VisitTimes(7.0, 3.0, 2.0)] * 8, is_packed=is_packed)
    compute_ms = 8 * 7.0
    both_passes_ms = 2 * 3.0  # nothing is uploaded across the end of one
    assert clock.step_ms() == pytest.approx(compute_ms + (both_passes_ms if is_packed else 3.0))
    assert clock.step_ms() == pytest.approx(compute_ms + (both_passes_ms if is_packed else 0.0))
