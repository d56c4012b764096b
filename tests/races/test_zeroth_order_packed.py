"""Zeroth order with fewer bytes on the way, under hostile schedules; and faults they must show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from hf_pyao.engine.transfer.ring_schedule import RingSchedule
from hf_pyao.engine.zeroth_order.visits import WeightVisits
from hf_pyao.errors import PyAOError
from tests.helpers.simulation.transport import SimulatedRaceError
from tests.races.test_zeroth_order import NUM_SCHEDULES, is_right


@pytest.mark.parametrize(
    "num_schedules", [16, pytest.param(NUM_SCHEDULES // 2, marks=pytest.mark.thorough)]
)
def test_bits_are_those_of_a_plain_run_under_every_schedule(num_schedules: int) -> None:
    for seed in range(num_schedules):
        assert is_right(seed, "int8"), seed


# ---- faults --------------------------------------------------------------------------------------


def _memory_is_used_while_copies_run() -> Any:
    """The host reads noise, and writes weights, while copies still read or write the memory."""
    return mock.patch.object(WeightVisits, "_wait_for_memory", return_value=None)


def _a_block_stays_over_the_end_of_a_step() -> Any:
    """Uploads go on into the next step, whose weights are not known yet."""

    def upcoming(self: WeightVisits) -> Any:
        return RingSchedule._upcoming(self)

    def begin_forward(self: WeightVisits) -> None:
        self.begin(trains=False)
        self.ahead()

    return mock.patch.multiple(WeightVisits, _upcoming=upcoming, begin_forward=begin_forward)


def _the_last_noise_is_not_waited_for() -> Any:
    """Noise is drawn into a slot while that of the micro-batch before is still copied back."""

    own = WeightVisits._update

    def update(self: WeightVisits, block: Any, slot: Any) -> None:
        self._copies_back.clear()
        own(self, block, slot)

    return mock.patch.object(WeightVisits, "_update", update)


MUTANTS: tuple[Callable[[], Any], ...] = (
    _memory_is_used_while_copies_run,
    _a_block_stays_over_the_end_of_a_step,
    _the_last_noise_is_not_waited_for,
)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # at the end of one
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_each_fault_shows_under_some_schedule(mutant: Callable[[], Any]) -> None:
    with mutant():
        for seed in range(60):
            try:
                if not is_right(seed, "int8"):
                    return
            except (PyAOError, SimulatedRaceError):
                return
    pytest.fail("no schedule has shown it")
