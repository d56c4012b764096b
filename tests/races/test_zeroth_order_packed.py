"""Zeroth order with fewer bytes on the way, under hostile schedules; and faults they must show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from hf_pyao.engine.transfer.ring_schedule import RingSchedule
from hf_pyao.engine.zeroth_order.packed_block import PackedBlock
from hf_pyao.engine.zeroth_order.packed_visits import PackedVisits
from hf_pyao.errors import PyAOError
from tests.helpers.simulation.transport import SimulatedRaceError
from tests.races.test_zeroth_order import NUM_SCHEDULES, expected_bits, is_right


@pytest.mark.parametrize(
    "num_schedules", [16, pytest.param(NUM_SCHEDULES // 2, marks=pytest.mark.thorough)]
)
def test_bits_are_those_of_a_plain_run_under_every_schedule(num_schedules: int) -> None:
    cases = [(momentum, name) for momentum in (0.0, 0.9) for name in ("bfloat16", "int8")]
    expected = {case: expected_bits(*case) for case in cases}
    for seed in range(num_schedules):
        case = cases[seed // 4 % 4]
        assert is_right(seed, expected[case], *case), seed


# ---- faults --------------------------------------------------------------------------------------


def _memory_is_used_while_copies_run() -> Any:
    """The host reads noise, and writes weights, while copies still read or write the memory."""
    return mock.patch.object(PackedVisits, "_wait_for_memory", return_value=None)


def _a_block_stays_over_the_end_of_a_step() -> Any:
    """Uploads go on into the next step, whose weights are not known yet."""

    def upcoming(self: PackedVisits) -> Any:
        return RingSchedule._upcoming(self)

    def is_stale(self: PackedVisits, block: int) -> bool:
        return False

    return mock.patch.multiple(PackedVisits, _upcoming=upcoming, _is_stale=is_stale)


def _noise_of_a_step_is_taken_for_another() -> Any:
    """The memory's noise is used for whatever step is asked for."""
    own = PackedBlock.draw_from

    def draw_from(self: PackedBlock, weight: Any, memory: Any = None) -> Any:
        if memory is None and self.index == 2:
            first, nbytes = self._places[weight].first, self._format.noise_itemsize
            memory = self._on_host_at(first, nbytes * weight.size.numel())
        return own(self, weight, memory)

    return mock.patch.object(PackedBlock, "draw_from", draw_from)


def _the_last_noise_is_not_waited_for() -> Any:
    """Noise is drawn into a slot while that of the micro-batch before is still copied back."""

    def upload(self: PackedVisits, block: int, slot: int) -> None:
        self._left_by[slot] = None
        own(self, block, slot)

    own = PackedVisits.upload
    return mock.patch.object(PackedVisits, "upload", upload)


MUTANTS: tuple[Callable[[], Any], ...] = (
    _memory_is_used_while_copies_run,
    _a_block_stays_over_the_end_of_a_step,
    _noise_of_a_step_is_taken_for_another,
    _the_last_noise_is_not_waited_for,
)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # at the end of one
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_each_fault_shows_under_some_schedule(mutant: Callable[[], Any]) -> None:
    expected = expected_bits(0.0, "bfloat16")
    with mutant():
        for seed in range(60):
            try:
                if not is_right(seed, expected, 0.0, "bfloat16"):
                    return
            except (PyAOError, SimulatedRaceError):
                return
    pytest.fail("no schedule has shown it")
