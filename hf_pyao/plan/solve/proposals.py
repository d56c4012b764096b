"""Plans that are proposed for a recorded step: by the integer program, and without a solver.

The integer program knows sums only: bytes, time on the link, compute that hides it. It does not
know the order of copies, or that they come in bursts. ``predict`` does, so each proposal is judged
by the prediction of the whole step. If compute still waits for copies, the program is solved again
with that much less time to hide them. Further proposals need no solver: keep everything,
checkpoint, offload the layers' inputs, offload everything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakValueDictionary

from hf_pyao.plan.documents.plan import KEEP, OFFLOAD, RECOMPUTE
from hf_pyao.plan.documents.plan_facts import KEEP_EVERYTHING
from hf_pyao.plan.paper.pyao_plan import paths_of
from hf_pyao.plan.predict.allocator_replay import StepMemory
from hf_pyao.plan.predict.outcome import Outcome
from hf_pyao.plan.solve.coding import CodedWays
from hf_pyao.plan.solve.optimal import InfeasibleError, solve
from hf_pyao.plan.solve.placement import place
from hf_pyao.plan.solve.plan_problem import PlanChoice, PlanProblem
from hf_pyao.plan.solve.step_problem import (
    Conditions,
    IsForced,
    chosen_slots,
    outcome_of,
    problem_of,
)
from hf_pyao.plan.step.planned_step import PlannedStep, StepPlanner
from hf_pyao.plan.step.prediction import Coded, Prediction
from hf_pyao.plan.step.step_program import StepProgram

KEEP_ALL = KEEP_EVERYTHING
CHECKPOINT = "checkpointing"
LAYER_INPUTS = "offload the layers' inputs, recompute the rest"
OFFLOAD_ALL = "offload everything"
FIRST_CHECKPOINTED = "checkpointing of the first layers"
FIRST_OFFLOADED = "offload the first layers"
FIRST_RUN_AGAIN = "the first layers run again as a whole"
"""As the engine's segments of one layer, which take the host less than tracing operations."""
PLANNED = "planned"

NUM_BUDGETS = 32
"""Between keeping nothing and keeping everything: how finely the front is looked for."""

NUM_REPAIRS = 3
"""How often the program is solved again with less time to hide copies under."""

FAR_BEYOND = 1.05
"""Times a limit: a proposal whose first try has a higher peak is given up. Of those within 1 to 3 %
some fit once they are repaired."""

LEAST_STALL = 5e-4
"""Share of a step below which waiting for copies is not worth another solution."""


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
    outcome: Outcome
    """What it comes to."""
    num_checkpointed: int = 0
    """First layers that run again as a whole."""
    problem: PlanProblem | None = None
    """What was solved, if anything was."""
    choice: PlanChoice | None = None

    @property
    def step(self) -> PlannedStep:
        """The step with the plan carried out in it."""
        return self.outcome.step

    @property
    def timed(self) -> Prediction:
        """As :attr:`Outcome.timed`."""
        return self.outcome.timed

    @property
    def memory(self) -> StepMemory:
        """What the device's allocator reserves for it, and whether that fits."""
        return self.outcome.memory

    @property
    def step_ms(self) -> float:
        """Predicted time."""
        return self.outcome.step_ms

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of what is allocated on the device."""
        return self.outcome.peak_bytes

    @property
    def host_bytes(self) -> int:
        """Predicted peak on the host, with the masters of streamed weights."""
        return self.outcome.host_bytes


class Proposals:
    """Makes plans for one recorded step, and keeps them.

    Args:
        program: the step, whole, recorded without recomputation.
        times_ms: what each operation takes.
        conditions: link, window, and what else is given.
        host_limit_bytes: most bytes on the host.
        forced: says of a slot, by name, that it is recomputed if it can be; None: of none.
        coding: how slots may be written; None: as they are.
        stepper: carries out plans in the step, as another planner for it does; None: a new one.
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
        stepper: StepPlanner | None = None,
    ) -> None:
        self.program = program
        self.conditions = conditions
        self.host_limit_bytes = host_limit_bytes
        self.stepper = stepper or StepPlanner(
            program, times_ms, conditions.rebuild_factor, conditions.min_bytes
        )
        self._times_ms = times_ms
        self._forced = forced
        self._coding = coding
        self._proposals: dict[tuple[int, Conditions], Candidate | None] = {}
        self._too_large: dict[tuple[int, Conditions], Candidate] = {}
        """First tries of proposals that were far from fitting."""
        self._simple: dict[str, Candidate] = {}
        self._first_layers: dict[tuple[str, int], Candidate | None] = {}
        self._alike: WeakValueDictionary[tuple[object, ...], Outcome] = WeakValueDictionary()
        """By what they do: several searches come to plans that do the same."""
        self.num_solved = 0

    @property
    def may_lose(self) -> bool:
        """True if slots may be written in a codec that loses something, besides the given one."""
        return self._coding is not None and self._coding.allow_lossy

    # ---- plans that need no solver -------------------------------------------------------------

    @cached_property
    def kept(self) -> Candidate:
        """The plan that keeps everything."""
        return self._candidate(KEEP_ALL, [KEEP] * len(self.program.slots))

    @cached_property
    def simple_names(self) -> tuple[str, ...]:
        """Names of the plans that need no solver."""
        names = [KEEP_ALL]
        if self.conditions.may_recompute and self.stepper.search is not None:
            names.append(CHECKPOINT)
            if self.conditions.may_offload:
                names.append(LAYER_INPUTS)
        if self.conditions.may_offload:
            names.append(OFFLOAD_ALL)
        return tuple(names)

    def simple(self, names: Iterable[str] | None = None) -> dict[str, Candidate]:
        """Return the plans that need no solver, by name; *names*: only these."""
        return {name: self._simple_plan(name) for name in names or self.simple_names}

    def _simple_plan(self, name: str) -> Candidate:
        if name not in self._simple:
            self._simple[name] = self._make_simple(name)
        return self._simple[name]

    def _make_simple(self, name: str) -> Candidate:
        if name == KEEP_ALL:
            return self.kept
        if name == OFFLOAD_ALL:
            return self._candidate(name, self._actions(OFFLOAD))
        products = frozenset({*paths_of(self.program), ""})
        inputs = OFFLOAD if name == LAYER_INPUTS else KEEP
        otherwise = [inputs] * len(self.program.slots)
        return self._candidate(name, self._actions(RECOMPUTE), products, otherwise=otherwise)

    def of_first_layers(self, name: str, num_layers: int) -> Candidate | None:
        """Return the plan that does with the first layers what a simple one does with all.

        None where the conditions do not allow it.

        Args:
            name: :data:`FIRST_CHECKPOINTED`, :data:`FIRST_RUN_AGAIN` or :data:`FIRST_OFFLOADED`.
            num_layers: how many; the others are kept.
        """
        key = (name, num_layers)
        if key not in self._first_layers:
            self._first_layers[key] = self._of_first_layers(name, num_layers)
        return self._first_layers[key]

    def _of_first_layers(self, name: str, num_layers: int) -> Candidate | None:
        num_slots = len(self.program.slots)
        if name == FIRST_OFFLOADED:
            if not self.conditions.may_offload:
                return None
            return self._candidate(name, self._actions(OFFLOAD, num_layers))
        if not self.conditions.may_recompute or self.stepper.search is None:
            return None
        if name == FIRST_RUN_AGAIN and not self.conditions.may_checkpoint:
            return None
        return self._candidate(
            name,
            self._actions(RECOMPUTE, num_layers),
            frozenset({*paths_of(self.program), ""}),
            otherwise=[KEEP] * num_slots,
            num_checkpointed=num_layers if name == FIRST_RUN_AGAIN else 0,
        )

    @property
    def num_open_layers(self) -> int:
        """Layers of which something is decided: all but the last ones that are kept."""
        return self.program.num_layers - self.conditions.keep_last_layers

    def _actions(self, action: str, num_layers: int | None = None) -> list[str]:
        actions = [KEEP] * len(self.program.slots)
        for layer in range(self.num_open_layers if num_layers is None else num_layers):
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

    def proposal(
        self, budget: int, conditions: Conditions | None = None, limit_bytes: float = math.inf
    ) -> Candidate | None:
        """Return the best plan that keeps at most ``budget / NUM_BUDGETS`` of the bytes.

        None if there is none.

        Args:
            budget: what it may keep, of :data:`NUM_BUDGETS`.
            conditions: in place of the planner's.
            limit_bytes: what it is to fit. A plan that is far from it is not made faster.
        """
        conditions = conditions or self.conditions
        key = (budget, conditions)
        if key in self._proposals:
            return self._proposals[key]
        first = self._too_large.get(key)
        if first is not None and first.peak_bytes > FAR_BEYOND * limit_bytes:
            return first
        found, is_first = self._propose(budget, conditions, limit_bytes)
        if is_first and found is not None:
            self._too_large[key] = found
        else:
            self._proposals[key] = found
        return found

    def _propose(
        self, budget: int, conditions: Conditions, limit_bytes: float
    ) -> tuple[Candidate | None, bool]:
        """Return a proposal, and whether it is the first try, which is far from fitting."""
        coding = self._coding
        problem = problem_of(
            self.stepper,
            conditions,
            kept_bytes=self.total_bytes(conditions) * budget / NUM_BUDGETS,
            host_bytes=self.host_limit_bytes - self.program.streamed.host_bytes,
            ways_of=None if coding is None else lambda slot: coding.ways(slot, conditions.link),
            is_forced=self._forced,
        )
        best: Candidate | None = None
        kept = self.kept.timed
        for _ in range(1 + NUM_REPAIRS):
            try:
                choice = solve(problem)
            except InfeasibleError:
                break
            self.num_solved += 1
            found = self._carried_out(problem, choice, conditions)
            if best is None and found.peak_bytes > FAR_BEYOND * limit_bytes:
                return found, True
            if best is None or found.step_ms < best.step_ms:
                best = found
            timed = found.timed
            # Waiting for streamed weights is nobody's fault: no plan has less of it.
            forward_ms = max(0.0, timed.stall_forward_ms - kept.stall_forward_ms)
            backward_ms = max(0.0, timed.stall_backward_ms - kept.stall_backward_ms)
            stall_ms = forward_ms + backward_ms
            if stall_ms <= LEAST_STALL * timed.step_ms or stall_ms <= _expected_stall_ms(found):
                break
            problem = dataclasses.replace(
                problem,
                forward_ms=problem.forward_ms - forward_ms,
                backward_ms=problem.backward_ms - backward_ms,
            )
        return best, False

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
        num_checkpointed: int = 0,
    ) -> Candidate:
        conditions = conditions or self.conditions
        num_slots = len(self.program.slots)
        if otherwise is None:
            otherwise = [OFFLOAD if conditions.may_offload else KEEP] * num_slots
        codecs = tuple(codecs or [None] * num_slots)
        # Without slots to rebuild, the rest says nothing.
        rebuilt: tuple[object, ...] = ()
        if RECOMPUTE in actions:
            rebuilt = (frozenset(products), tuple(otherwise), num_checkpointed)
        key = (tuple(actions), codecs, rebuilt, conditions.window_bytes)
        outcome = self._alike.get(key)
        if outcome is None:
            coded = self._coded(actions, codecs)
            step = self.stepper.plan(actions, products, otherwise, coded, num_checkpointed)
            self._alike[key] = outcome = outcome_of(step, conditions)
        return Candidate(
            name=name,
            actions=tuple(actions),
            otherwise=tuple(otherwise),
            codecs=codecs,
            products=frozenset(products),
            keep_last_layers=conditions.keep_last_layers,
            window_bytes=conditions.window_bytes,
            problem=problem,
            choice=choice,
            outcome=outcome,
            num_checkpointed=num_checkpointed,
        )

    def _coded(self, actions: Sequence[str], codecs: Sequence[str | None]) -> dict[int, Coded]:
        """Return the slots that are written smaller, by number."""
        coding = self._coding
        if coding is None:
            return {}
        found = {}
        for number, slot in enumerate(self.program.slots):
            coded = coding.coded(slot, codecs[number])
            if actions[number] == OFFLOAD and coded is not None:
                found[number] = coded
        return found

    def again(self, candidate: Candidate) -> Candidate:
        """Return *candidate*, of a planner for the same step, with these times and this link."""
        conditions = dataclasses.replace(
            self.conditions,
            keep_last_layers=candidate.keep_last_layers,
            window_bytes=candidate.window_bytes,
        )
        return self._candidate(
            candidate.name,
            candidate.actions,
            candidate.products,
            otherwise=candidate.otherwise,
            codecs=candidate.codecs,
            conditions=conditions,
            problem=candidate.problem,
            choice=candidate.choice,
            num_checkpointed=candidate.num_checkpointed,
        )

    def step_ms_at(self, candidate: Candidate, ratio: float) -> float:
        """Return what a step takes under a candidate over a link *ratio* times as fast."""
        return candidate.outcome.step_ms_at(ratio)

    def all_known(self) -> list[Candidate]:
        """Return all plans that were looked at."""
        proposals = [each for each in self._proposals.values() if each is not None]
        proposals += self._too_large.values()
        first = [each for each in self._first_layers.values() if each is not None]
        return [*self.simple().values(), *first, *proposals]


def _expected_stall_ms(candidate: Candidate) -> float:
    """Return what the integer program expected compute to wait: a repair cannot help there."""
    choice, problem = candidate.choice, candidate.problem
    if choice is None or problem is None:
        return 0.0
    # Without any plan, streamed weights may take longer than compute.
    weights_ms = max(0.0, -problem.forward_ms) + max(0.0, -problem.backward_ms)
    return max(0.0, choice.overhead_ms - candidate.step.rebuild_ms - weights_ms) * 1.02
