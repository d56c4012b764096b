"""The host's clock beside the device's."""

from __future__ import annotations

import pytest

from hf_pyao.errors import ConfigError
from hf_pyao.plan.hardware.host_model import FAR_AHEAD, IN_STEP, HostClock, HostModel


def run(model: HostModel, kernels_ms: list[float]) -> tuple[list[float], list[float]]:
    """Return when each kernel begins, and what the host knows behind it."""
    clock, compute_ms = HostClock(model), 0.0
    starts, seen = [], []
    for elapsed_ms in kernels_ms:
        start_ms = clock.launch(compute_ms)
        compute_ms = start_ms + elapsed_ms
        clock.ends(compute_ms)
        starts.append(start_ms)
        seen.append(clock.seen_ms(compute_ms))
    return starts, seen


def test_a_host_that_is_far_ahead_costs_nothing_and_knows_nothing() -> None:
    assert run(FAR_AHEAD, [2.0, 3.0, 1.0]) == ([0.0, 2.0, 5.0], [0.0] * 3)


def test_a_host_in_step_knows_all() -> None:
    assert run(IN_STEP, [2.0, 3.0, 1.0]) == ([0.0, 2.0, 5.0], [2.0, 5.0, 6.0])


def test_a_full_queue_stops_the_host() -> None:
    """It queues the third kernel once the first is done."""
    starts, seen = run(HostModel(queue_limit=2), [2.0, 3.0, 1.0, 1.0])
    assert starts == [0.0, 2.0, 5.0, 6.0]
    assert seen == [0.0, 0.0, 2.0, 5.0]


def test_a_slow_host_is_waited_for() -> None:
    starts, seen = run(HostModel(op_ms=2.0), [1.0, 5.0, 1.0])
    assert starts == [2.0, 4.0, 9.0]
    assert seen == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("bad", [{"op_ms": -1.0}, {"op_ms": float("inf")}, {"queue_limit": -1}])
def test_what_makes_no_sense_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(bad))} is "):
        HostModel(**bad)  # type: ignore[arg-type]
