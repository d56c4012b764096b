"""The study of streamed weights on a clock: what a step takes, and rivals of `auto`."""

from __future__ import annotations

import pytest

from studies.streaming_grid import CLOCK_LAYERS, GRID_LAYERS, MODELS, clock_rows, grid_rows, step_of
from tests.helpers.lora_steps import lora_step

SIZE = (2, 1024)
LINKS = (3.0, 12.0, 50.0)


def test_a_step_takes_the_slower_of_compute_and_lane_of_each_pass_and_one_upload() -> None:
    program = lora_step(num_layers=48, micro_batch=2, length=512)
    rows = list(clock_rows("Llama", (2, 512), program, (2.0, 60.0)))
    assert {bool(row.reloaded_bytes) for row in rows} == {False, True}
    assert {row.num_resident for row in rows} == {0, 6}
    for row in rows:
        assert abs(row.off) <= 0.02, row


@pytest.mark.thorough
@pytest.mark.parametrize("model", MODELS)
def test_the_same_of_each_model(model: str) -> None:
    """Where compute and lane take about as long, or groups of experts stand between resident
    layers, the lane is idle at times: two slots look no further ahead."""
    for row in clock_rows(model, SIZE, step_of(model, SIZE, CLOCK_LAYERS), LINKS):
        assert -0.02 <= row.off <= (0.02 if row.h2d_gb_per_s < 50 else 0.05), row


@pytest.mark.thorough
@pytest.mark.parametrize("model", MODELS)
def test_no_rival_is_faster(model: str) -> None:
    resident = step_of(model, SIZE, GRID_LAYERS)
    again = step_of(model, SIZE, GRID_LAYERS, checkpointing=True)
    for row in grid_rows(model, SIZE, resident, again, (6.0, 25.0), (0.2, 1.0)):
        assert row.fits
        assert row.slower is not None
        assert row.slower <= 0.002, row
        assert row.num_uploads == 0 or row.share < 1
