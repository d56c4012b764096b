"""Finds the fastest plan that fits, among those that the integer program proposes, and says why.

The integer program knows sums: bytes, time on the link, compute to hide it under. What order and
bursts make of them, the prediction of the whole step says (``predict``): each proposal is judged by
it, and where compute waits for copies after all, the program is solved again with as much less time
to hide them under. Beside the proposals stand the plans that need no solver: keeping everything,
checkpointing, offloading the layers' inputs, offloading everything. What is chosen is never slower
than the best of those that fit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from hf_pyao.errors import PyAOError
from hf_pyao.planning.coding import CodedWays
from hf_pyao.planning.optimal import InfeasibleError, solve
from hf_pyao.planning.placement import place
from hf_pyao.planning.plan_problem import PlanChoice, PlanProblem
from hf_pyao.planning.planned_step import PlannedStep, StepPlanner
from hf_pyao.planning.predict import predict
from hf_pyao.planning.prediction import Prediction
from hf_pyao.planning.pyao_plan import paths_of
from hf_pyao.planning.step_problem import Conditions, IsForced, chosen_slots, problem_of
from hf_pyao.planning.step_program import StepProgram
from hf_pyao.report.plan_report import KEEP, OFFLOAD, RECOMPUTE

KEEP_ALL = "keep everything"
CHECKPOINT = "checkpointing"
LAYER_INPUTS = "offload the layers' inputs, recompute the rest"
OFFLOAD_ALL = "offload everything"
PLANNED = "planned"

NUM_BUDGETS = 32
"""Between keeping nothing and keeping everything: how finely the front is looked for."""

NUM_BELOW = 2
"""Budgets below the largest that fits which are looked at too: a smaller one may be faster, since
whole layers do not divide evenly."""

CHEAP = 1.002
"""Times the step without a limit: where a plan is no slower, less in flight is not tried."""

FREE = 1e-6
"""Share of a step below which a plan costs nothing: larger budgets cannot be faster."""

NUM_REPAIRS = 3
"""How often the program is solved again with less time to hide copies under."""

LEAST_STALL = 5e-4
"""Share of a step below which waiting for copies is not worth another solution."""


class NoPlanFitsError(PyAOError, ValueError):
    """No plan's peak is within the limit."""

    def __init__(self, message: str, least_peak_bytes: int) -> None:
        super().__init__(message)
        self.least_peak_bytes = least_peak_bytes
        """The lowest peak of any plan."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A plan for a step, and what it comes to."""

    name: str
    actions: tuple[str, ...]
    """By slot of the step."""
    otherwise: tuple[str, ...]
    """By slot: what becomes of what is stored to rebuild it."""
    codecs: tuple[str | None, ...]
    """By slot; None: as the configuration says."""
    products: frozenset[str]
    """Sub-modules whose matrix products may run again."""
    keep_last_layers: int
    window_bytes: int | None
    step: PlannedStep
    timed: Prediction
    """With the link's speed."""
    late: Prediction
    """With copies that are never early: its peak holds on every link."""
    problem: PlanProblem | None = None
    """What was solved, if anything was."""
    choice: PlanChoice | None = None

    @property
    def step_ms(self) -> float:
        """Predicted time."""
        return self.timed.step_ms

    @property
    def peak_bytes(self) -> int:
        """Predicted peak on the device."""
        return self.late.peak_bytes

    @property
    def host_bytes(self) -> int:
        """Predicted peak on the host."""
        return self.late.host_peak_bytes


class Planner:
    """Finds plans for one recorded step.

    Args:
        program: the step, whole, recorded without recomputation.
        times_ms: what each operation takes.
        conditions: link, window, and what else is given.
        host_limit_bytes: most bytes on the host.
        forced: says of a slot, by name, that it is recomputed if it can be; None: of none.
        coding: how slots may be written; None: as they are.
    """

    def __init__(
        self,
        program: StepProgram,
        times_ms: Sequence[float],
        conditions: Conditions,
        *,
        host_limit_bytes: float = math.inf,
        forced: IsForced | None = None,
        coding: CodedWays | None = None,
    ) -> None:
        self.program = program
        self.conditions = conditions
        self.host_limit_bytes = host_limit_bytes
        self.stepper = StepPlanner(program, times_ms)
        self._times_ms = times_ms
        self._forced = forced
        self._coding = coding
        self._proposals: dict[tuple[int, Conditions], Candidate | None] = {}
        self._simple: dict[str, Candidate] | None = None
        self.num_solved = 0
        self.num_predicted = 0

    # ---- plans that need no solver -------------------------------------------------------------

    def simple(self) -> dict[str, Candidate]:
        """Return the plans that need no solver, by name."""
        if self._simple is None:
            num_slots = len(self.program.slots)
            self._simple = {KEEP_ALL: self._candidate(KEEP_ALL, [KEEP] * num_slots)}
            if self.conditions.may_recompute and self.stepper.search is not None:
                products = frozenset({*paths_of(self.program), ""})
                for name, inputs in ((CHECKPOINT, KEEP), (LAYER_INPUTS, OFFLOAD)):
                    if inputs == OFFLOAD and not self.conditions.may_offload:
                        continue
                    actions = self._actions(RECOMPUTE)
                    self._simple[name] = self._candidate(
                        name, actions, products, otherwise=[inputs] * num_slots
                    )
            if self.conditions.may_offload:
                self._simple[OFFLOAD_ALL] = self._candidate(OFFLOAD_ALL, self._actions(OFFLOAD))
        return self._simple

    def _actions(self, action: str) -> list[str]:
        actions = [KEEP] * len(self.program.slots)
        for layer in range(self.program.num_layers - self.conditions.keep_last_layers):
            for number in chosen_slots(self.stepper, layer, self.conditions):
                actions[number] = action
        return actions

    # ---- proposals -----------------------------------------------------------------------------

    def total_bytes(self, conditions: Conditions) -> int:
        """Return the bytes of which something is decided."""
        return sum(
            self.program.slots[number].nbytes
            for layer in range(self.program.num_layers - conditions.keep_last_layers)
            for number in chosen_slots(self.stepper, layer, conditions)
        )

    def proposal(self, budget: int, conditions: Conditions | None = None) -> Candidate | None:
        """Return the best plan that keeps at most ``budget / NUM_BUDGETS`` of the bytes.

        None if there is none.
        """
        conditions = conditions or self.conditions
        key = (budget, conditions)
        if key not in self._proposals:
            self._proposals[key] = self._propose(budget, conditions)
        return self._proposals[key]

    def _propose(self, budget: int, conditions: Conditions) -> Candidate | None:
        coding = self._coding
        problem = problem_of(
            self.stepper,
            conditions,
            kept_bytes=self.total_bytes(conditions) * budget / NUM_BUDGETS,
            host_bytes=self.host_limit_bytes,
            ways_of=None if coding is None else lambda slot: coding.ways(slot, conditions.link),
            is_forced=self._forced,
        )
        best: Candidate | None = None
        for _ in range(1 + NUM_REPAIRS):
            try:
                choice = solve(problem)
            except InfeasibleError:
                break
            self.num_solved += 1
            found = self._carried_out(problem, choice, conditions)
            if best is None or found.step_ms < best.step_ms:
                best = found
            timed = found.timed
            stall_ms = timed.stall_forward_ms + timed.stall_backward_ms
            if stall_ms <= LEAST_STALL * timed.step_ms or stall_ms <= _expected_stall_ms(found):
                break
            problem = dataclasses.replace(
                problem,
                forward_ms=problem.forward_ms - timed.stall_forward_ms,
                backward_ms=problem.backward_ms - timed.stall_backward_ms,
            )
        return best

    def _carried_out(
        self, problem: PlanProblem, choice: PlanChoice, conditions: Conditions
    ) -> Candidate:
        placed = place(problem, choice)
        actions, codecs = [], []
        for slot in self.program.slots:
            there = placed.get((slot.layer, slot.name))
            actions.append(KEEP if there is None else there.action)
            codecs.append(None if there is None else there.codec)
        return self._candidate(
            PLANNED,
            actions,
            choice.products(problem),
            codecs=codecs,
            conditions=conditions,
            problem=problem,
            choice=choice,
        )

    def _candidate(
        self,
        name: str,
        actions: Sequence[str],
        products: Collection[str] = (),
        *,
        otherwise: Sequence[str] | None = None,
        codecs: Sequence[str | None] | None = None,
        conditions: Conditions | None = None,
        problem: PlanProblem | None = None,
        choice: PlanChoice | None = None,
    ) -> Candidate:
        conditions = conditions or self.conditions
        num_slots = len(self.program.slots)
        if otherwise is None:
            otherwise = [OFFLOAD if conditions.may_offload else KEEP] * num_slots
        step = self.stepper.plan(actions, products, otherwise, self._coded(actions, codecs))
        self.num_predicted += 1
        gradient_bytes = conditions.gradient_bytes
        timed = predict(
            step.program,
            step.leaves,
            window_bytes=conditions.window_bytes,
            times_ms=step.times_ms,
            link=conditions.link,
            rebuilds=step.rebuilds,
            gradient_bytes=gradient_bytes,
            copied_bytes=step.copied_bytes,
        )
        late = predict(
            step.program,
            step.leaves,
            window_bytes=conditions.window_bytes,
            rebuilds=step.rebuilds,
            copied_bytes=step.copied_bytes,
        )
        return Candidate(
            name=name,
            actions=tuple(actions),
            otherwise=tuple(otherwise),
            codecs=tuple(codecs or [None] * num_slots),
            products=frozenset(products),
            keep_last_layers=conditions.keep_last_layers,
            window_bytes=conditions.window_bytes,
            step=step,
            timed=timed,
            late=late,
            problem=problem,
            choice=choice,
        )

    def _coded(
        self, actions: Sequence[str], codecs: Sequence[str | None] | None
    ) -> dict[int, tuple[int, float]]:
        """Return bytes on the link and ms of coding of slots that are written smaller."""
        coding = self._coding
        if coding is None:
            return {}
        found = {}
        for number, slot in enumerate(self.program.slots):
            nbytes = coding.link_bytes(slot, None if codecs is None else codecs[number])
            if actions[number] == OFFLOAD and nbytes:
                found[number] = nbytes, coding.coding_ms(slot)
        return found

    # ---- the choice ----------------------------------------------------------------------------

    def best(self, limit_bytes: float) -> Candidate:
        """Return the fastest plan whose peak is within *limit_bytes*.

        Raises:
            NoPlanFitsError: there is none; the lowest peak is named.
        """
        simple = self.simple()
        if self._fits(simple[KEEP_ALL], limit_bytes):
            return simple[KEEP_ALL]
        found = [each for each in simple.values() if self._fits(each, limit_bytes)]
        for conditions in self._conditions():
            proposal = self._fastest_fitting(conditions, limit_bytes)
            if proposal is not None:
                found.append(proposal)
            # A tighter window leaves room to keep more: of use where memory costs time.
            if found and min(map(_rank, found))[0] <= CHEAP * simple[KEEP_ALL].step_ms:
                break
        if not found:
            least = self.least()
            raise NoPlanFitsError(
                f"no plan's peak is within {_size(limit_bytes)}; the lowest is "
                f"{_size(least.peak_bytes)} ({least.name}).",
                least.peak_bytes,
            )
        return min(found, key=_rank)

    def least(self) -> Candidate:
        """Return the plan with the lowest peak that is known of."""
        for conditions in self._conditions():
            self.proposal(0, conditions)
        return min(self.all_known(), key=lambda each: each.peak_bytes)

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

    def _fastest_fitting(self, conditions: Conditions, limit_bytes: float) -> Candidate | None:
        """Return the fastest proposal within the limit; of equals, the one with the lowest peak."""
        least = self.proposal(0, conditions)
        if least is None or not self._fits(least, limit_bytes):
            return None
        # The peak grows with what is kept, from this to keeping everything.
        most_bytes = self.simple()[KEEP_ALL].peak_bytes
        share = (limit_bytes - least.peak_bytes) / max(1, most_bytes - least.peak_bytes)
        fitting = [least]
        num_below = 0
        for budget in range(min(NUM_BUDGETS, math.ceil(share * NUM_BUDGETS) + 1), 0, -1):
            found = self.proposal(budget, conditions)
            if found is not None and self._fits(found, limit_bytes):
                fitting.append(found)
                num_below += 1
            if num_below > NUM_BELOW:
                break
        return min(fitting, key=_rank)

    def _fits(self, candidate: Candidate, limit_bytes: float) -> bool:
        return candidate.peak_bytes <= limit_bytes and candidate.host_bytes <= self.host_limit_bytes

    def all_known(self) -> list[Candidate]:
        """Return all plans that were looked at."""
        proposals = [each for each in self._proposals.values() if each is not None]
        return [*self.simple().values(), *proposals]

    def front(self, num_points: int = 9) -> list[Candidate]:
        """Return plans from the lowest peak to keeping everything, none beaten in both."""
        for point in range(num_points):
            found_there = self.proposal(round(point * NUM_BUDGETS / (num_points - 1)))
            if found_there and found_there.step_ms <= self.simple()[KEEP_ALL].step_ms * (1 + FREE):
                break
        return self.front_so_far()

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


def _expected_stall_ms(candidate: Candidate) -> float:
    """Return what the integer program expected compute to wait: a repair cannot help there."""
    if candidate.choice is None:
        return 0.0
    return max(0.0, candidate.choice.overhead_ms - candidate.step.rebuild_ms) * 1.02


def _size(nbytes: float) -> str:
    if nbytes < 2**28:
        return f"{nbytes / 2**20:.3g} MiB"
    return f"{nbytes / 2**30:.2f} GiB"
