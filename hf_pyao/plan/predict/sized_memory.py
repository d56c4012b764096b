"""The memory of a way to train at one size, by any of the plans that it may follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.predict.allocator_replay import StepMemory
from hf_pyao.plan.step.prediction import Prediction
from hf_pyao.plan.step.step_program import StepProgram


class PlanMemory:
    """The memory of a predicted step under several settings of the allocator.

    Args:
        program: the step.
        late: its prediction with late copies.
        early: as for :class:`~hf_pyao.plan.predict.allocator_replay.StepMemory`.
    """

    def __init__(
        self, program: StepProgram, late: Prediction, early: Callable[[], Prediction] | None
    ) -> None:
        self.peak_bytes = late.peak_bytes
        self._program = program
        self._late = late
        self._early = None if early is None else cache(early)
        self._known: dict[AllocatorSettings, StepMemory] = {}

    def under(self, settings: AllocatorSettings) -> StepMemory:
        """Return the memory under *settings*."""
        if settings not in self._known:
            self._known[settings] = StepMemory(self._program, self._late, self._early, settings)
        return self._known[settings]


class SizedMemory:
    """The memory of one size: that of the first plan that fits.

    Args:
        plans: the memory of each plan that may be followed.
        later_bytes: what is on the device while the optimizer steps.
    """

    def __init__(self, plans: Sequence[PlanMemory], later_bytes: int) -> None:
        self._plans = sorted(plans, key=lambda each: each.peak_bytes)
        self._later_bytes = later_bytes

    def needed_within(
        self, limit_bytes: float, settings: AllocatorSettings, *, roughly: bool = False
    ) -> int:
        """Return about what is needed, above *limit_bytes* if no plan fits.

        Args:
            limit_bytes: what may be reserved.
            settings: the allocator's.
            roughly: what is reserved without giving anything back will do.
        """
        memories = [each.under(settings) for each in self._plans]
        memory = next((each for each in memories if each.fits(limit_bytes)), memories[0])
        needed = memory.reserved_about if roughly else memory.needed_within
        return max(needed(limit_bytes), self._later_bytes)
