"""On the virtual clock a zeroth-order step takes as long as its busiest lane."""

from __future__ import annotations

import pytest

from hf_pyao.plan.weights.visit_clock import VisitClock, VisitTimes, least_step_ms


def step_ms(blocks: list[VisitTimes], num_slots: int = 2) -> float:
    clock = VisitClock(blocks, num_slots)
    clock.step_ms()
    return clock.step_ms()


@pytest.mark.parametrize("ends", [0, 1, 4])
@pytest.mark.parametrize("offload_ms", [1.0, 3.0])
@pytest.mark.parametrize("upload_ms", [1.0, 3.0])
@pytest.mark.parametrize("compute_ms", [1.0, 3.0, 10.0])
@pytest.mark.sampled(every=5)
def test_a_step_is_its_busiest_lane_and_one_fill_and_drain(
    compute_ms: float, upload_ms: float, offload_ms: float, ends: int
) -> None:
    """*ends*: an embedding and a head of so many times a layer's bytes are blocks, too."""
    blocks = [VisitTimes(compute_ms, upload_ms, offload_ms, 0.1 * compute_ms)] * 24
    if ends:
        of_end = VisitTimes(compute_ms, ends * upload_ms, ends * offload_ms, 0.1 * compute_ms)
        blocks = [of_end, *blocks, of_end]
    fill_and_drain = max(b.upload_ms for b in blocks) + max(b.offload_ms for b in blocks)
    least = least_step_ms(blocks)
    assert least <= step_ms(blocks) <= 1.02 * (least + fill_and_drain)


def test_one_slot_overlaps_nothing() -> None:
    blocks = [VisitTimes(5.0, 3.0, 2.0, 0.0)] * 8
    assert step_ms(blocks, num_slots=1) == pytest.approx(8 * (5 + 3))
    assert step_ms(blocks) < 8 * 5 + 5 + 1e-6
