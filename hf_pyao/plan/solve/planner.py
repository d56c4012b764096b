"""Finds the fastest plan that fits, among those that are proposed.

What is chosen is never slower than the best of those that need no solver and fit. Where speeds are
not measured, that holds over a range of speeds, and the plan is chosen for its worst case there
(``../predict/speed_range.py``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

from hf_pyao.errors import PyAOError
from hf_pyao.plan.hardware.caching_allocator import EXPANDABLE_SEGMENTS
from hf_pyao.plan.predict.speed_range import (
    AS_GIVEN,
    MEASURED,
    NEVER_SLOWER,
    OFF_BY_30_PERCENT,
    likely_of,
    scaled,
    steadiest,
    worst_regret,
)
from hf_pyao.plan.solve.collections_paused import collections_paused
from hf_pyao.plan.solve.proposals import CHECKPOINT as CHECKPOINT
from hf_pyao.plan.solve.proposals import FAR_BEYOND, Proposals
from hf_pyao.plan.solve.proposals import FIRST_CHECKPOINTED as FIRST_CHECKPOINTED
from hf_pyao.plan.solve.proposals import FIRST_OFFLOADED as FIRST_OFFLOADED
from hf_pyao.plan.solve.proposals import FIRST_RUN_AGAIN as FIRST_RUN_AGAIN
from hf_pyao.plan.solve.proposals import KEEP_ALL as KEEP_ALL
from hf_pyao.plan.solve.proposals import LAYER_INPUTS as LAYER_INPUTS
from hf_pyao.plan.solve.proposals import NUM_BUDGETS as NUM_BUDGETS
from hf_pyao.plan.solve.proposals import OFFLOAD_ALL as OFFLOAD_ALL
from hf_pyao.plan.solve.proposals import PLANNED as PLANNED
from hf_pyao.plan.solve.proposals import Candidate as Candidate
from hf_pyao.plan.solve.step_problem import Conditions
from hf_pyao.plan.step.disk_share import with_blocks_on_disk
from hf_pyao.plan.step.streamed_step import with_streamed_blocks

NUM_BELOW = 2
"""Budgets below the largest that fits which are looked at too: a smaller one may be faster, since
whole layers do not divide evenly."""

CHEAP = 1.002
"""Times the step without a limit: where a plan is no slower, less in flight is not tried."""

COSTLY = 1.1
"""Times the step without a limit: where the best plan is slower, that for a slower link is looked
at too. The integer program takes copies for hidden that are not where memory is tight."""

LEAST_GROWTH = 1 / 3
"""By how much the peak grows at least with what may be kept, of what it grows with it on average:
proposals that are far from fitting for that alone are not made."""

NUM_BETWEEN = 2
"""Links between the slowest and the given one for which plans are made, where a plan is looked for
that loses nowhere."""

FREE = 1e-6
"""Share of a step below which a plan costs nothing: larger budgets cannot be faster."""


LOSSY_GAIN = 1.02
"""A plan with a lossy codec is chosen only if it is faster by this factor: the time that coding
takes is an estimate."""


class NoPlanFitsError(PyAOError, ValueError):
    """No plan's peak is within the limit."""

    key = "no-plan-fits"

    def __init__(self, message: str, least_peak_bytes: int) -> None:
        super().__init__(message)
        self.least_peak_bytes = least_peak_bytes
        """The lowest peak of any plan."""


class Planner(Proposals):
    """Chooses among the proposals for one recorded step; see :class:`Proposals`."""

    _exact: Planner | None = None
    """Of the same step, without codecs that lose; made where it is needed."""

    @cached_property
    def _elsewhere(self) -> dict[float, Planner]:
        """Of the same step, over a link that is faster or slower, by the factor."""
        return {}

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
        return self._like(
            program=program,
            conditions=dataclasses.replace(self.conditions, speed_ratios=ratios),
            stepper=self.stepper.streaming(program),
        )

    def _like(self, **changes: Any) -> Planner:
        """Return the planner for the same step with *changes*: arguments of :class:`Proposals`."""
        own = {
            "program": self.program,
            "times_ms": self._times_ms,
            "conditions": self.conditions,
            "host_limit_bytes": self.host_limit_bytes,
            "forced": self._forced,
            "coding": self._coding,
            "stepper": self.stepper,
        }
        return Planner(**{**own, **changes})

    def best(self, limit_bytes: float, *, for_slower: bool = True) -> Candidate:
        """Return the fastest plan that fits *limit_bytes*, see :class:`StepMemory`.

        One that loses something is taken only if it is faster by more than :data:`LOSSY_GAIN` than
        the best that loses nothing.

        Args:
            limit_bytes: what the device may hold.
            for_slower: where plans are costly, look at the one for a slower link too. It gains some
                percent at most, and takes as long as the others together.

        Raises:
            NoPlanFitsError: there is none; the lowest peak is named.
        """
        if not self.may_lose:
            return self._fastest(limit_bytes, for_slower)
        try:
            exact = self._lossless().best(limit_bytes, for_slower=for_slower)
        except NoPlanFitsError:
            return self._fastest(limit_bytes, for_slower)
        if exact.name == KEEP_ALL:
            return exact
        lossy = self._fastest(limit_bytes, for_slower)
        return lossy if lossy.step_ms * LOSSY_GAIN < exact.step_ms else exact

    def _lossless(self) -> Planner:
        if self._exact is None:
            coding = None if self._coding is None else self._coding.without_loss()
            self._exact = self._like(coding=coding)
        return self._exact

    def _fastest(self, limit_bytes: float, for_slower: bool) -> Candidate:
        """Return the fastest plan within the limit, whatever it loses."""
        kept = self.kept
        if self._fits(kept, limit_bytes):
            return kept
        found, plain, first = self._found(limit_bytes)
        if not self._is_for_one_speed:
            found += self.best_elsewhere(limit_bytes, [*plain, *first])
            return self._steadiest(found, plain, first, limit_bytes)
        best = min(found, key=_rank)
        is_costly = best.step_ms > COSTLY * kept.step_ms and best.problem is not None
        if is_costly and for_slower:
            slower = self._best_at(OFF_BY_30_PERCENT[0], limit_bytes, [*plain, *first])
            best = best if slower is None else min(best, slower, key=_rank)
        return best

    def _found(
        self, limit_bytes: float
    ) -> tuple[list[Candidate], list[Candidate], list[Candidate]]:
        """Return the plans to choose from that fit at the speeds as given.

        Then those of them that do the same with all layers, and with the first layers alone. Where
        one speed counts, those are left out that are known to be slower than others.
        """
        plain = self._fitting(self.simple().values(), limit_bytes)
        first = self.first_layers_fitting(limit_bytes, plain if self._is_for_one_speed else ())
        found = [*plain, *first]
        found += self._planned(limit_bytes, found)
        if not found:
            least = self.least()
            needed_bytes = least.memory.needed_within(limit_bytes)
            would_fit = least.memory.fits_if_expandable(limit_bytes)
            raise NoPlanFitsError(
                f"no plan fits {_size(limit_bytes)}; the least is "
                f"{_size(needed_bytes - limit_bytes)} more ({least.name}: {_size(needed_bytes)})."
                + (f" It fits with {EXPANDABLE_SEGMENTS}." if would_fit else ""),
                needed_bytes,
            )
        return found, plain, first

    @property
    def _is_for_one_speed(self) -> bool:
        """True if the fastest plan at the speeds as given is taken, whatever others take."""
        return set(self.conditions.speed_ratios) == {AS_GIVEN}

    def _fitting(self, candidates: Iterable[Candidate], limit_bytes: float) -> list[Candidate]:
        """Return those that fit; where one speed counts, the fastest of them."""
        if not self._is_for_one_speed:
            return [each for each in candidates if self._fits(each, limit_bytes)]
        by_rank = sorted(candidates, key=_rank)
        fastest = next((each for each in by_rank if self._fits(each, limit_bytes)), None)
        return [] if fastest is None else [fastest]

    def _planned(self, limit_bytes: float, others: Sequence[Candidate]) -> list[Candidate]:
        """Return the fastest proposal of each window that fits; *others* are known of."""
        found: list[Candidate] = []
        for conditions in self._conditions():
            known = [*others, *found]
            rivals = known if self._is_for_one_speed else ()
            proposal = self._fastest_fitting(conditions, limit_bytes, rivals)
            if proposal is not None:
                found.append(proposal)
                known.append(proposal)
            # A tighter window leaves room to keep more: of use where memory costs time.
            if known and min(map(_rank, known))[0] <= CHEAP * self.kept.step_ms:
                break
        return found

    def _steadiest(
        self,
        found: list[Candidate],
        plain: list[Candidate],
        first: list[Candidate],
        limit_bytes: float,
    ) -> Candidate:
        """Return the plan that loses least where speeds are not as given.

        A plan for the slowest link copies too little for a fast one, and a plan for the given link
        too much for a slow one. Where each loses to a plain way by more than
        :data:`~hf_pyao.plan.predict.speed_range.NEVER_SLOWER`, plans for links between are made.

        Args:
            found: plans to choose from.
            plain: ways that do the same with all layers.
            first: ways that do it with the first layers alone.
            limit_bytes: the limit within which they fit.
        """
        ratios, ways, ms = self.conditions.speed_ratios, [*plain, *first], self.step_ms_at
        likely = likely_of(ratios)
        bounds: list[list[tuple[list[Candidate], tuple[float, ...]]]] = [
            [(ways, ratios)],
            [(ways, likely), (plain, ratios)],
            [(ways, likely)],
            [(ways, (AS_GIVEN,)), (plain, ratios)],
            [(ways, (AS_GIVEN,))],
        ]
        chosen = steadiest(found, bounds, ratios, ms, _rank)
        slow, fast = min(likely), AS_GIVEN
        for _ in range(NUM_BETWEEN if ways and slow < fast else 0):
            if worst_regret(chosen, ways, likely, ms) <= NEVER_SLOWER:
                break
            between = math.sqrt(slow * fast)
            made = self._best_at(between, limit_bytes, ways)
            if made is None:
                break
            found.append(made)
            chosen = steadiest(found, bounds, ratios, ms, _rank)
            at_slowest = worst_regret(made, ways, (min(likely),), ms)
            if at_slowest == worst_regret(made, ways, likely, ms):
                fast = between  # it copies too much
            else:
                slow = between
        return chosen

    def first_layers_fitting(
        self, limit_bytes: float, rivals: Sequence[Candidate] = ()
    ) -> list[Candidate]:
        """Return checkpointing and offloading of as few of the first layers as fit.

        Args:
            limit_bytes: the limit.
            rivals: plans that fit. Where more layers than a number have to be offloaded, which
                takes longer already, they are not looked at.
        """
        found = []
        rival_ms = min((_rank(each)[0] for each in rivals), default=math.inf)
        for name, of_all in ((FIRST_CHECKPOINTED, CHECKPOINT), (FIRST_OFFLOADED, OFFLOAD_ALL)):
            whole = self.simple().get(of_all)
            if whole is None or whole.memory.fits(limit_bytes):  # else fewer layers do not either
                found.append(self._fewest(name, limit_bytes, self.num_open_layers - 1, rival_ms))
        if self.conditions.host is not None:
            found.append(self.fewest_run_again(limit_bytes))
        return [each for each in found if each is not None]

    def fewest_run_again(self, limit_bytes: float) -> Candidate | None:
        """Return the plan by which as few of the first layers as fit run again as a whole.

        None where none fits, or where layers may not.
        """
        return self._fewest(FIRST_RUN_AGAIN, limit_bytes, self.num_open_layers)

    def _fewest(
        self, name: str, limit_bytes: float, most: int, rival_ms: float = math.inf
    ) -> Candidate | None:
        """Return what does *name* with as few of the first layers as fit, *most* at most."""
        best: Candidate | None = None
        too_few, enough = 0, most + 1
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            candidate = self.of_first_layers(name, middle)
            if candidate is None:
                break
            if self._fits(candidate, limit_bytes):
                enough, best = middle, candidate
            elif _rank(candidate)[0] > rival_ms:
                break
            else:
                too_few = middle
        return best

    def best_elsewhere(self, limit_bytes: float, ways: Sequence[Candidate] = ()) -> list[Candidate]:
        """Return the best plans for links that are faster or slower than given.

        Args:
            limit_bytes: the limit within which they fit.
            ways: those that need no solver and fit, over the given link.
        """
        ratios = (ratio for ratio in self.conditions.speed_ratios if ratio != AS_GIVEN)
        found = (self._best_at(ratio, limit_bytes, ways) for ratio in ratios)
        return [each for each in found if each is not None]

    def _best_at(
        self, ratio: float, limit_bytes: float, ways: Sequence[Candidate]
    ) -> Candidate | None:
        """Return the best plan for a link *ratio* times as fast, as it is over the given one.

        None if none fits, over that link or over the given one.
        """
        if ratio not in self._elsewhere:
            link = scaled(self.conditions.link, ratio)
            self._elsewhere[ratio] = self._like(
                conditions=dataclasses.replace(self.conditions, link=link, speed_ratios=MEASURED)
            )
        there = self._elsewhere[ratio]
        best = there._best_planned(limit_bytes, ways) if ratio < AS_GIVEN else None
        if best is None:
            try:
                found, *_ = there._found(limit_bytes)
            except NoPlanFitsError:
                return None
            best = min(found, key=_rank)
        candidate = self.again(best)
        return candidate if self._fits(candidate, limit_bytes) else None

    def _best_planned(self, limit_bytes: float, ways: Sequence[Candidate]) -> Candidate | None:
        """Return the best plan if a proposal is: without predicting anew what needs no solver.

        Args:
            limit_bytes: the limit within which it fits.
            ways: those that need no solver and fit, over a faster link. They take no less here.
        """
        least_ms = min((each.step_ms for each in ways), default=0.0)
        if least_ms <= CHEAP * self.kept.step_ms:
            return None
        best = min(self._planned(limit_bytes, ()), key=_rank, default=None)
        return best if best is not None and best.step_ms < least_ms else None

    def least(self) -> Candidate:
        """Return the plan with the lowest peak that is known of, of those that the host holds."""
        for conditions in self._conditions():
            self._tightest(conditions)
        # Keeping everything takes nothing of the host.
        within = [c for c in self.all_known() if c.host_bytes <= self.host_limit_bytes]
        return min(within or self.all_known(), key=lambda each: each.peak_bytes)

    def _tightest(self, conditions: Conditions) -> tuple[int, Candidate | None]:
        """Return the least budget for which there is a plan, and the plan; None if there is none.

        Where the host is too small for everything, a part has to be kept.
        """
        found = self.proposal(0, conditions)
        if found is not None or math.isinf(self.host_limit_bytes):
            return 0, found
        none, some = 0, NUM_BUDGETS
        found = self.proposal(some, conditions)
        while found is not None and some - none > 1:
            middle = (none + some) // 2
            proposal = self.proposal(middle, conditions)
            if proposal is None:
                none = middle
            else:
                some, found = middle, proposal
        return some, found

    def _conditions(self) -> Iterable[Conditions]:
        """Yield the conditions, and then tighter ones, as far as they are free."""
        yield self.conditions
        if self.conditions.window_bytes is not None and self.conditions.may_shrink_window:
            yield dataclasses.replace(
                self.conditions, window_bytes=self.conditions.window_bytes // 4
            )
            if self.conditions.keep_last_layers and self.conditions.may_keep_fewer:
                yield dataclasses.replace(
                    self.conditions,
                    window_bytes=self.conditions.window_bytes // 4,
                    keep_last_layers=0,
                )

    def _fastest_fitting(
        self, conditions: Conditions, limit_bytes: float, rivals: Sequence[Candidate]
    ) -> Candidate | None:
        """Return the fastest proposal within the limit; of equals, the one with the lowest peak.

        None if none is faster than *rivals*, which fit.
        """
        best = min(map(_rank, rivals), default=(math.inf, 0))

        def fits(candidate: Candidate) -> bool:
            # The allocator is not asked about what will not be taken.
            if _rank(candidate) >= best and candidate.peak_bytes <= limit_bytes:
                return candidate.host_bytes <= self.host_limit_bytes
            return self._fits(candidate, limit_bytes)

        first, least = self._tightest(conditions)
        if least is None or not fits(least):
            return None
        # The peak grows with what is kept, from this to keeping everything.
        most_bytes = self.kept.peak_bytes
        growth_bytes = max(1, most_bytes - least.peak_bytes)
        share = (limit_bytes - least.peak_bytes) / growth_bytes
        last = first + math.ceil(share * (NUM_BUDGETS - first)) + 1
        # At least so much is in the way, however little a proposal keeps of what it may.
        far_share = (FAR_BEYOND * limit_bytes - least.peak_bytes) / growth_bytes / LEAST_GROWTH
        last = min(last, first + int(far_share * (NUM_BUDGETS - first)))
        fitting = [least]
        num_below = 0
        for budget in range(min(NUM_BUDGETS, last), first, -1):
            found = self.proposal(budget, conditions, limit_bytes)
            if found is not None and fits(found):
                fitting.append(found)
                num_below += 1
            if num_below > NUM_BELOW:
                break
        fastest = min(fitting, key=_rank)
        return fastest if _rank(fastest) < best else None

    def _fits(self, candidate: Candidate, limit_bytes: float) -> bool:
        if candidate.host_bytes > self.host_limit_bytes:
            return False
        return candidate.memory.fits(limit_bytes)

    def front(self, num_points: int = 9) -> list[Candidate]:
        """Return plans from the lowest peak to keeping everything, none beaten in both."""
        with collections_paused():
            self._find_front(num_points)
        return self.front_so_far()

    def _find_front(self, num_points: int) -> None:
        for point in range(num_points):
            found_there = self.proposal(round(point * NUM_BUDGETS / (num_points - 1)))
            if found_there and found_there.step_ms <= self.kept.step_ms * (1 + FREE):
                break

    def front_so_far(self) -> list[Candidate]:
        """Return, of all plans that were looked at, those that none beats in time and peak."""
        found: list[Candidate] = []
        for each in sorted(self.all_known(), key=lambda each: (each.peak_bytes, each.step_ms)):
            if not found or each.step_ms < found[-1].step_ms - 1e-9:
                found.append(each)
        return found


def _rank(candidate: Candidate) -> tuple[float, int]:
    # Times that differ by less than a millionth are equal: the lower peak counts then.
    return (float(f"{candidate.step_ms:.6g}"), candidate.peak_bytes)


def _size(nbytes: float) -> str:
    if nbytes < 2**28:
        return f"{nbytes / 2**20:.3g} MiB"
    return f"{nbytes / 2**30:.2f} GiB"
