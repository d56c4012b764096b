"""The transfer schedule on the virtual clock: what overlap gains, and what memory it costs.

Layers are synthetic: each saves a few slots at even intervals of its compute, and its copies take
``ratio`` times as long as its forward compute. So the ideal is known exactly.
"""

from __future__ import annotations

import pytest

from tests.helpers.simulation.schedule_runs import UNIT_LAYERS, run_schedule

NUM_LAYERS = UNIT_LAYERS.num_layers
LAYER_BYTES = UNIT_LAYERS.layer_bytes
LAYER_MS = UNIT_LAYERS.forward_ms
SLOT_BYTES = LAYER_BYTES // UNIT_LAYERS.num_slots
OFFLOADED_LAYERS = NUM_LAYERS - 1
FORWARD_MS = NUM_LAYERS * LAYER_MS
BACKWARD_MS = 2 * FORWARD_MS


def _ideal_ms(ratio: float) -> float:
    """Each phase takes the longer of its compute and its copies."""
    copies_ms = OFFLOADED_LAYERS * LAYER_MS * ratio
    return max(FORWARD_MS, copies_ms) + max(BACKWARD_MS, copies_ms)


@pytest.mark.thorough
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.9, 1.0])
def test_copies_that_fit_under_compute_cost_nothing(ratio: float) -> None:
    outcome = run_schedule(ratio, window=2 * LAYER_BYTES)
    # The first layer of the forward has nothing to hide under yet.
    assert outcome.step_ms <= (FORWARD_MS + BACKWARD_MS) * 1.02 + LAYER_MS


@pytest.mark.thorough
@pytest.mark.parametrize("ratio", [1.25, 1.5, 2.0, 3.0])
def test_copies_that_do_not_fit_bound_the_step(ratio: float) -> None:
    outcome = run_schedule(ratio, window=2 * LAYER_BYTES)
    # What the window still holds when backward begins is read in place and not brought back, so
    # the step may be shorter than if everything crossed the link twice.
    not_reloaded = outcome.metrics["offloaded_bytes"] - outcome.metrics["reloaded_bytes"]
    saved_ms = not_reloaded / LAYER_BYTES * LAYER_MS * ratio
    assert 0 <= not_reloaded <= 2 * LAYER_BYTES
    assert (_ideal_ms(ratio) - 2 * saved_ms) * 0.95 <= outcome.step_ms <= _ideal_ms(ratio) * 1.05


@pytest.mark.thorough
@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5])
def test_more_freedom_is_never_slower(ratio: float) -> None:
    blocking = run_schedule(ratio, copy_streams=0).step_ms
    no_prefetch = run_schedule(ratio, prefetches=False).step_ms
    per_layer = run_schedule(ratio, window="layer").step_ms
    by_bytes = run_schedule(ratio, window=2 * LAYER_BYTES).step_ms
    assert by_bytes < per_layer < no_prefetch < blocking


@pytest.mark.thorough
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("window", [0, SLOT_BYTES, LAYER_BYTES, 3 * LAYER_BYTES])
@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_device_peak_is_bounded_by_the_window(window: int, ratio: float) -> None:
    outcome = run_schedule(ratio, window=window)
    kept_bytes = LAYER_BYTES  # the last layer
    # One slot's computation: its input and output, the gradient, and the stack's own input.
    working_set = 4 * SLOT_BYTES
    assert outcome.peak_bytes <= kept_bytes + window + working_set


@pytest.mark.thorough
def test_the_paper_window_needs_no_more_than_two_layers_besides_the_last() -> None:
    outcome = run_schedule(1.5, window="layer")
    assert outcome.peak_bytes <= 3 * LAYER_BYTES + 4 * SLOT_BYTES


def test_reloads_go_before_gradients_on_a_shared_engine() -> None:
    outcome = run_schedule(0.5, copy_engines=1, gradient_bytes=4 * LAYER_BYTES)
    # Gradients fill the engine, yet backward waits for no more than the copy that is under way.
    assert outcome.step_ms <= (FORWARD_MS + BACKWARD_MS) * 1.5


def test_metrics_agree_with_the_clock() -> None:
    outcome = run_schedule(2.0, window=LAYER_BYTES)
    metrics = outcome.metrics
    stall_ms = metrics["stall_forward_ms"] + metrics["stall_backward_ms"]
    assert stall_ms == pytest.approx(outcome.step_ms - FORWARD_MS - BACKWARD_MS)
    moved_bytes = metrics["offloaded_bytes"] + metrics["reloaded_bytes"]
    assert metrics["transfer_ms"] == pytest.approx(moved_bytes / LAYER_BYTES * LAYER_MS * 2.0)
    assert 0.0 < metrics["overlap_efficiency"] < 1.0
