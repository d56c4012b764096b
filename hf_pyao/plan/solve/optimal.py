"""Solves a :class:`~hf_pyao.plan.solve.plan_problem.PlanProblem` by integer programming.

What the problem says is linear in how many layers do what, so that HiGHS (scipy) solves it exactly.
The tensor-level knapsack under a memory budget, the time of a step as the larger of compute and
transfer, and adaptive residency are all this program.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hf_pyao.errors import PyAOError
from hf_pyao.plan.solve.plan_problem import (
    GroupChoice,
    LayerGroup,
    PlanChoice,
    PlanProblem,
    Way,
    overhead_ms,
)

if TYPE_CHECKING:
    import numpy

RELATIVE_GAP = 2e-3
"""How far above the least overhead a choice may be when the search ends."""

TIME_LIMIT_S = 2.0
"""After which the best choice so far is taken."""

_STDOUT = threading.Lock()  # held while the process's stdout is exchanged

TIE_MS = 1e-7
"""What a copy and what a recomputation cost beside their time: of equals, the fewer."""


class InfeasibleError(PyAOError, ValueError):
    """No choice holds within the limits."""

    key = "no-plan-fits"


def solve(problem: PlanProblem, relative_gap: float = RELATIVE_GAP) -> PlanChoice:
    """Return the choice with the least overhead.

    Args:
        problem: what is to be decided.
        relative_gap: how far above the least overhead it may be.

    Raises:
        InfeasibleError: nothing holds within ``kept_bytes`` and ``host_bytes``.
    """
    return _Program(problem).solve(relative_gap)


def bound_ms(problem: PlanProblem) -> float:
    """Return the overhead below which no choice is: the least with fractions of layers.

    Negative infinity if nothing holds within the limits.
    """
    return _Program(problem).bound_ms()


class _Program:
    """The columns and rows of the integer program."""

    def __init__(self, problem: PlanProblem) -> None:
        self.problem = problem
        self.costs: list[float] = []
        self.uppers: list[float] = []
        self.is_integer: list[bool] = []
        self.rows: list[dict[int, float]] = []
        self.row_bounds: list[tuple[float, float]] = []
        self.kept: dict[int, float] = {}
        """Column -> bytes that it keeps."""
        self.host: dict[int, float] = {}
        self.offload_ms: dict[int, float] = {}
        self.reload_ms: dict[int, float] = {}
        self.forward_ms: dict[int, float] = {}
        self.backward_ms: dict[int, float] = {}
        self.may_run: dict[str, int] = {}
        """Sub-module -> column that is 1 if its products run again, which a plan says once."""
        self.groups = [_GroupColumns(self, group) for group in problem.groups]
        self._add_limits()

    # ---- building ------------------------------------------------------------------------------

    def column(self, upper: float, cost: float = 0.0, *, is_integer: bool = True) -> int:
        """Add a column; return its number."""
        self.costs.append(cost)
        self.uppers.append(upper)
        self.is_integer.append(is_integer)
        return len(self.costs) - 1

    def row(self, terms: dict[int, float], least: float, most: float) -> None:
        """Add a row."""
        self.rows.append(terms)
        self.row_bounds.append((least, most))

    def way(self, way: Way, upper: int) -> int:
        """Add a column for something that leaves."""
        number = self.column(
            upper, way.forward_ms + way.backward_ms + TIE_MS * (1 + way.offload_ms)
        )
        self.host[number] = way.host_bytes
        self.offload_ms[number] = way.offload_ms
        self.reload_ms[number] = way.reload_ms
        if way.forward_ms:
            self.forward_ms[number] = way.forward_ms
        if way.backward_ms:
            self.backward_ms[number] = way.backward_ms
        return number

    def column_of_products(self, path: str) -> int:
        """Return the column that says whether a sub-module's products run again."""
        if path not in self.may_run:
            self.may_run[path] = self.column(1)
        return self.may_run[path]

    def _add_limits(self) -> None:
        problem, inf = self.problem, float("inf")
        if problem.kept_bytes < inf:
            self.row(dict(self.kept), -inf, problem.kept_bytes)
        if problem.host_bytes < inf:
            self.row(dict(self.host), -inf, problem.host_bytes)
        for copies, compute, hidden_ms in (
            (self.offload_ms, self.forward_ms, problem.forward_ms),
            (
                self.reload_ms,
                self.backward_ms,
                problem.backward_ms - (problem.gradient_ms if problem.copy_engines == 1 else 0.0),
            ),
        ):
            stall = self.column(inf, 1.0, is_integer=False)
            terms = dict(copies)
            for number, elapsed_ms in compute.items():
                terms[number] = terms.get(number, 0.0) - elapsed_ms
            terms[stall] = -1.0
            self.row(terms, -inf, hidden_ms)

    # ---- solving -------------------------------------------------------------------------------

    def solve(self, relative_gap: float) -> PlanChoice:
        found = self._run(self.is_integer, relative_gap)
        if found.x is None:
            raise InfeasibleError(
                f"no plan keeps at most {self.problem.kept_bytes:.4g} bytes on the device and "
                f"{self.problem.host_bytes:.4g} on the host."
            )
        groups = tuple(group.choice(found.x) for group in self.groups)
        return PlanChoice(groups=groups, overhead_ms=overhead_ms(self.problem, groups))

    def bound_ms(self) -> float:
        relaxed = self._run([False] * len(self.costs), RELATIVE_GAP)
        return float("-inf") if relaxed.x is None else float(relaxed.fun)

    def _run(self, integrality: Sequence[bool], relative_gap: float) -> Any:
        import numpy
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        data: list[float] = []
        columns: list[int] = []
        starts = [0]
        for terms in self.rows:
            columns += terms.keys()
            data += terms.values()
            starts.append(len(columns))
        matrix = csr_array(
            (numpy.array(data, dtype=float), columns, starts),
            shape=(len(self.rows), len(self.costs)),
        )
        lower = numpy.array([least for least, _ in self.row_bounds], dtype=float)
        upper = numpy.array([most for _, most in self.row_bounds], dtype=float)
        return without_lines_of_highs(
            lambda: milp(
                c=numpy.array(self.costs, dtype=float),
                constraints=LinearConstraint(matrix, lower, upper),
                bounds=Bounds(0, numpy.array(self.uppers, dtype=float)),
                integrality=numpy.array(integrality, dtype=int),
                options={"mip_rel_gap": relative_gap, "time_limit": TIME_LIMIT_S},
            )
        )


def without_lines_of_highs(solve: Callable[[], Any]) -> Any:
    """Return what *solve* returns; lines that HiGHS prints for its developers do not show.

    It prints them to the C library's stdout, whatever it is told. What others print meanwhile comes
    afterwards.
    """
    with _STDOUT, contextlib.ExitStack() as stack:
        try:
            kept = os.dup(1)
            stack.callback(os.close, kept)
            printed = stack.enter_context(tempfile.TemporaryFile())
            os.dup2(printed.fileno(), 1)
        except OSError:  # there is no stdout, or no room for a file
            return solve()
        try:
            return solve()
        finally:
            with contextlib.suppress(OSError, AttributeError, TypeError):
                ctypes.CDLL(None).fflush(None)
            os.dup2(kept, 1)
            printed.seek(0)
            os.write(1, b"".join(each for each in printed if not each.startswith(b"HighsMip")))


class _GroupColumns:
    """The columns of one group."""

    def __init__(self, program: _Program, group: LayerGroup) -> None:
        self.group = group
        number = group.num_layers
        self.runs = [program.column(number, step.elapsed_ms + TIE_MS) for step in group.steps]
        for column, step in zip(self.runs, group.steps, strict=True):
            program.backward_ms[column] = step.elapsed_ms
        self.kept: list[int] = []
        self.rebuilt: list[int | None] = []
        self.ways: list[list[int]] = []
        for slot in group.slots:
            kept = program.column(number)
            program.kept[kept] = slot.nbytes
            ways = [program.way(way, number) for way in slot.ways]
            terms = dict.fromkeys((kept, *ways), 1.0)
            rebuilt = None
            if slot.maker is not None:
                rebuilt = program.column(number)
                terms[rebuilt] = 1.0
                program.row({self.runs[slot.maker]: 1.0, rebuilt: -1.0}, 0.0, number)
            program.row(terms, number, number)
            if slot.is_rebuilt and rebuilt is not None:
                program.row({rebuilt: 1.0}, number, number)
            self.kept.append(kept)
            self.ways.append(ways)
            self.rebuilt.append(rebuilt)
        self.stored: list[list[int]] = []
        for source in group.sources:
            kept = program.column(number)
            program.kept[kept] = source.nbytes
            self.stored.append([kept, *(program.way(way, number) for way in source.ways)])
        self._add_steps(program)

    def _add_steps(self, program: _Program) -> None:
        group, number = self.group, self.group.num_layers
        for position, step in enumerate(group.steps):
            runs = self.runs[position]
            for needed in step.needs:
                program.row({self.runs[needed]: 1.0, runs: -1.0}, 0.0, number)
            for number_of_source in step.sources:
                terms = dict.fromkeys(self.stored[number_of_source], 1.0)
                maker = group.sources[number_of_source].maker
                if maker is not None:
                    terms[self.runs[maker]] = 1.0
                terms[runs] = -1.0
                program.row(terms, 0.0, float("inf"))
            if step.is_product:
                allowed = program.column_of_products(step.path)
                program.row({runs: 1.0, allowed: -float(number)}, -float("inf"), 0.0)
        for source, columns in zip(group.sources, self.stored, strict=True):
            if source.maker is None:
                continue
            allowed = program.column_of_products(group.steps[source.maker].path)
            terms = dict.fromkeys(columns, 1.0)
            terms[allowed] = float(number)
            program.row(terms, -float("inf"), float(number))

    def choice(self, x: numpy.ndarray) -> GroupChoice:
        """Return what a solution says of the group."""

        def count(column: int | None) -> int:
            return 0 if column is None else round(float(x[column]))

        rebuilt = [count(column) for column in self.rebuilt]
        stored = [[count(column) for column in columns] for columns in self.stored]
        return GroupChoice(
            kept=tuple(map(count, self.kept)),
            offloaded=tuple(tuple(map(count, ways)) for ways in self.ways),
            rebuilt=tuple(rebuilt),
            runs=least_runs(self.group, rebuilt, stored),
            stored=tuple(map(tuple, stored)),
        )


def least_runs(
    group: LayerGroup, rebuilt: Sequence[int], stored: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """Return in how many layers each step runs if none runs for nothing.

    Args:
        group: the layers.
        rebuilt: by slot, in how many it is rebuilt.
        stored: by source, in how many it is kept, and leaves by each way.
    """
    runs = [0] * len(group.steps)
    pending = [
        (slot.maker, number)
        for slot, number in zip(group.slots, rebuilt, strict=True)
        if slot.maker is not None and number
    ]
    while pending:
        step, number = pending.pop()
        if runs[step] >= number:
            continue
        runs[step] = number
        pending += [(needed, number) for needed in group.steps[step].needs]
        for position in group.steps[step].sources:
            maker = group.sources[position].maker
            if maker is not None and not any(stored[position]):
                pending.append((maker, number))
    return tuple(runs)
