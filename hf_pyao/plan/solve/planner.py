"""Chooses among plans for one recorded step: the fastest that fits.

What is chosen is never slower than the best of the plain ways that fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from functools import cached_property
from weakref import WeakValueDictionary

from hf_pyao.errors import PyAOError
from hf_pyao.metrics import format_bytes
from hf_pyao.plan.hardware.caching_allocator import EXPANDABLE_SEGMENTS
from hf_pyao.plan.solve.candidate import CHECKPOINT as CHECKPOINT
from hf_pyao.plan.solve.candidate import FIRST_CHECKPOINTED as FIRST_CHECKPOINTED
from hf_pyao.plan.solve.candidate import FIRST_OFFLOADED as FIRST_OFFLOADED
from hf_pyao.plan.solve.candidate import FIRST_RUN_AGAIN as FIRST_RUN_AGAIN
from hf_pyao.plan.solve.candidate import KEEP_ALL as KEEP_ALL
from hf_pyao.plan.solve.candidate import LAYER_INPUTS as LAYER_INPUTS
from hf_pyao.plan.solve.candidate import OFFLOAD_ALL as OFFLOAD_ALL
from hf_pyao.plan.solve.candidate import Candidate as Candidate
from hf_pyao.plan.solve.search import Search
from hf_pyao.plan.solve.steering import LOSSY_GAIN, NEVER_SLOWER, SEARCHED
from hf_pyao.plan.solve.ways import Ways
from hf_pyao.plan.step.disk_share import with_blocks_on_disk
from hf_pyao.plan.step.streamed_step import with_streamed_blocks


class NoPlanFitsError(PyAOError, ValueError):
    """No plan's peak is within the limit."""

    key = "no-plan-fits"

    def __init__(self, message: str, least_peak_bytes: int) -> None:
        super().__init__(message)
        self.least_peak_bytes = least_peak_bytes
        """The lowest peak of any plan."""


class Planner(Ways):
    """Chooses among plans for one recorded step; see :class:`Ways`."""

    @cached_property
    def _streaming(self) -> WeakValueDictionary[tuple[object, ...], Planner]:
        """Of the same step, with weights streamed: what one search has found another one uses."""
        return WeakValueDictionary()

    def streaming(
        self, layers: Collection[int], speed_ratios: tuple[float, ...] | None = None
    ) -> Planner:
        """Return the planner for the same step with the frozen weights of *layers* streamed.

        Args:
            layers: positions of layers; none: the weights stay.
            speed_ratios: in place of those of the conditions.
        """
        ratios = self.conditions.speed_ratios if speed_ratios is None else speed_ratios
        if not layers and ratios == self.conditions.speed_ratios:
            return self
        key = (*layers, ratios)
        found = self._streaming.get(key)
        if found is None:
            self._streaming[key] = found = self._with_streamed(layers, ratios)
        return found

    def _with_streamed(self, layers: Collection[int], ratios: tuple[float, ...]) -> Planner:
        program = with_streamed_blocks(self.program, layers)
        disk, placed = self.conditions.link.disk, self.conditions.placed_weights
        if placed is not None:
            program = placed.of(program)
        elif disk is not None:
            program = with_blocks_on_disk(program, min(self.host_limit_bytes, disk.host_bytes))
        return Planner(
            program,
            self._times_ms,
            dataclasses.replace(self.conditions, speed_ratios=ratios),
            host_limit_bytes=self.host_limit_bytes,
            forced=self._forced,
            coding=self._coding,
            stepper=self.stepper.streaming(program),
        )

    def best(self, limit_bytes: float) -> Candidate:
        """Return the fastest plan that fits *limit_bytes*, see :class:`StepMemory`.

        One that loses something is taken only if it is faster by more than
        :data:`~hf_pyao.plan.solve.steering.LOSSY_GAIN` than the best that loses nothing. Where
        speeds are not measured, the fastest one is taken of those that are nowhere slower than a
        plain way by more than :data:`~hf_pyao.plan.solve.steering.NEVER_SLOWER`.

        Args:
            limit_bytes: what the device may hold.

        Raises:
            NoPlanFitsError: there is none; the lowest peak is named.
        """
        if self.fits(self.kept, limit_bytes):
            return self.kept
        ratios = self.conditions.speed_ratios
        is_for_one = len(ratios) == 1
        plain = [each for each in self.simple().values() if self.fits(each, limit_bytes)]
        plain += self.first_layers_fitting(limit_bytes, plain if is_for_one else ())
        found: list[Candidate] = []
        others: list[Candidate] = []
        rung: int | None = None
        for ratio in ratios if is_for_one else SEARCHED:
            search = Search(self, limit_bytes, plain, ratio, rung)
            exact, lossy = search.run()
            rung = search.rung
            others += search.fitting
            if lossy is not None:
                lossy_ms = lossy.outcome.step_ms_at(ratio) * LOSSY_GAIN
                if exact is None or lossy_ms < exact.outcome.step_ms_at(ratio):
                    exact = lossy
            found += [] if exact is None else [exact]
        found = [*plain, *dict.fromkeys(found)]
        if not found:
            return self._least_that_fits(limit_bytes)
        by_rank = sorted(found, key=Candidate.rank)
        if is_for_one or not plain:
            return by_rank[0]
        least = [min(each.outcome.step_ms_at(ratio) for each in plain) for ratio in ratios]

        def regret(candidate: Candidate) -> float:
            times_ms = map(candidate.outcome.step_ms_at, ratios)
            return max(ms / least_ms for ms, least_ms in zip(times_ms, least, strict=True)) - 1

        for known in (by_rank, sorted(dict.fromkeys(others), key=Candidate.rank)):
            steady = next((each for each in known if regret(each) <= NEVER_SLOWER), None)
            if steady is not None:
                return steady
        return min(by_rank, key=regret)

    def _least_that_fits(self, limit_bytes: float) -> Candidate:
        least = self.least()
        if self.fits(least, limit_bytes):
            return least
        needed_bytes = least.memory.needed_within(limit_bytes)
        would_fit = least.memory.fits_if_expandable(limit_bytes)
        raise NoPlanFitsError(
            f"no plan fits {format_bytes(limit_bytes)}; the least is "
            f"{format_bytes(needed_bytes - limit_bytes)} more ({least.name}: "
            f"{format_bytes(needed_bytes)})."
            + (f" It fits with {EXPANDABLE_SEGMENTS}." if would_fit else ""),
            needed_bytes,
        )

    def least(self) -> Candidate:
        """Return the plan with the lowest peak that is found, of those that the host holds."""
        return self._least

    @cached_property
    def _least(self) -> Candidate:
        search = Search(self, 0.0, ())
        search.run()
        known = [*self.simple().values(), *search.nearest]
        # Keeping everything takes nothing of the host.
        within = [each for each in known if each.host_bytes <= self.host_limit_bytes]
        return min(within or known, key=lambda each: each.peak_bytes)

    def front(self, num_points: int) -> list[Candidate]:
        """Return plans from the lowest peak to keeping everything, none beaten in both.

        Args:
            num_points: limits that are searched between these, both included.
        """
        least, most = self.least(), self.kept
        known = [*self.simple().values(), least, most]
        step_bytes = (most.peak_bytes - least.peak_bytes) / max(1, num_points - 1)
        for point in range(num_points - 1):
            limit_bytes = least.peak_bytes + point * step_bytes
            known += filter(None, Search(self, limit_bytes, (), is_quick=True).run())
        found: list[Candidate] = []
        for each in sorted(dict.fromkeys(known), key=lambda each: (each.peak_bytes, each.step_ms)):
            if not found or each.step_ms < found[-1].step_ms - 1e-9:
                found.append(each)
        return found
