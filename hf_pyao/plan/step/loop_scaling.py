"""A step with loops over rows at other micro-batches than it was recorded at.

Such a step has numbers that grow with the micro-batch, with the rows of a loop's last part, or with
the number of its parts; the other parts have as many rows as they may. Each is told from three
recordings: two tell a line, and the third has to lie on it, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import cache
from itertools import combinations
from math import ceil
from typing import NamedTuple

from hf_pyao.plan.step.loops import NUM_SHOWN, Loop
from hf_pyao.plan.step.scaling import (
    OtherOperationsError,
    check_structure,
    combined,
    structure_of,
)
from hf_pyao.plan.step.step_program import StepProgram

LEAST_PARTS = NUM_SHOWN + 2
"""From so many parts on a loop shows the same parts: the second ends in the first half of all."""

MOST_BEYOND = 64
"""How many sizes are looked at for three that tell all lines from each other."""

Variables = tuple[int, ...]


class _Line(NamedTuple):
    """A number that grows with one of several variables."""

    variable: int
    slope: Fraction
    base: Fraction

    def at(self, variables: Variables) -> int:
        return ceil(self.base + self.slope * variables[self.variable])


class LoopLines:
    """The loops of a step as a function of its micro-batch.

    Args:
        points: two micro-batches or more, and the programs recorded there.

    Raises:
        OtherOperationsError: there are other loops at one than at another, or ones whose parts
            follow rules of their own.
    """

    def __init__(self, points: Sequence[tuple[int, StepProgram]]) -> None:
        sizes = [size for size, _ in points]
        loops = [program.loops for _, program in points]
        self._lines: list[tuple[_Line, Loop]] = []
        if len(set(map(len, loops))) > 1:
            raise OtherOperationsError(f"the step runs other loops at the sizes {sizes}")
        for same in zip(*loops, strict=True):
            first = same[0]
            if first is None or any(
                each is None or each._replace(num_rows=first.num_rows) != first for each in same
            ):
                raise OtherOperationsError(f"the step runs other loops at the sizes {sizes}")
            rows = tuple(each.num_rows for each in same if each is not None)
            line = _line_through(rows, [(size,) for size in sizes])
            if line.slope:
                self._lines.append((line, first))

    def at(self, size: int) -> list[Loop]:
        """Return the loops whose rows grow with the micro-batch, at *size*."""
        return [loop._replace(num_rows=line.at((size,))) for line, loop in self._lines]

    def variables(self, size: int) -> Variables:
        """Return what numbers grow with: the micro-batch, rows of last parts, numbers of parts."""
        loops = self.at(size)
        last_rows = (loop.last_rows for loop in loops)
        return (size, *last_rows, *(loop.num_parts for loop in loops))

    def holds(self, size: int) -> bool:
        """Say whether all loops have :data:`LEAST_PARTS` or more, as large as they may be."""
        return all(
            loop.num_parts >= LEAST_PARTS and loop.part_rows == loop.most_rows
            for loop in self.at(size)
        )

    def telling_sizes(self, begin: int) -> tuple[int, int, int] | None:
        """Return three sizes from *begin* on that tell all variables from each other."""
        sizes = filter(self.holds, range(begin, begin + MOST_BEYOND))
        for found in combinations(sizes, 3):
            if _differ(zip(*map(self.variables, found), strict=True)):
                return found
        return None


def likely_least_size(program: StepProgram) -> int | None:
    """Return from which micro-batch on the loops of a step have :data:`LEAST_PARTS`, it seems.

    None if it has loops of other rules.

    Args:
        program: the step of one sample.
    """
    sizes = [
        None if loop is None else (LEAST_PARTS - 1) * loop.most_rows // loop.num_rows + 1
        for loop in program.loops
    ]
    return None if None in sizes else max((each for each in sizes if each is not None), default=2)


def interpolate_loops(points: Sequence[tuple[int, StepProgram]]) -> Callable[[int], StepProgram]:
    """Return the program as a function of the micro-batch.

    Args:
        points: sizes as :meth:`LoopLines.telling_sizes` returns them, and the programs there.

    Raises:
        OtherOperationsError: the programs do not run the same operations, or a number lies on no
            line. The function raises it where loops have fewer or smaller parts.
    """
    sizes = [size for size, _ in points]
    programs = [program for _, program in points]
    check_structure(sizes, [structure_of(program, with_runs=False) for program in programs])
    lines = LoopLines(points)
    variables = [lines.variables(size) for size in sizes]

    @cache
    def line_of(values: tuple[float, ...]) -> _Line:
        return _line_through(values, variables)

    def at(size: int) -> StepProgram:
        if not lines.holds(size):
            raise OtherOperationsError(f"the loops have few or small parts at {size}")
        own = lines.variables(size)
        value = cache(lambda values: line_of(values).at(own))
        return combined(programs, value, value)

    if any(at(size) != program for size, program in points):
        raise OtherOperationsError(f"workspaces at the sizes {sizes} are not what is computed")
    return at


def _line_through(values: Sequence[float], variables: Sequence[Variables]) -> _Line:
    """Return the line in one of *variables* on which *values* lie.

    Raises:
        OtherOperationsError: there is none.
    """
    first = Fraction(values[0])
    if all(value == values[0] for value in values):
        return _Line(0, Fraction(0), first)
    for number, known in enumerate(zip(*variables, strict=True)):
        if known[0] == known[1]:
            continue
        slope = (Fraction(values[1]) - first) / (known[1] - known[0])
        line = _Line(number, slope, first - slope * known[0])
        if all(
            line.base + slope * each == value for each, value in zip(known, values, strict=True)
        ):
            return line
    raise OtherOperationsError(f"the numbers {values} lie on no line in {list(variables)}")


def _differ(variables: Iterable[tuple[int, ...]]) -> bool:
    """Say whether no variable is a line in another at three sizes, or the same at all."""
    steps = [(second - first, third - first) for first, second, third in variables]
    return all(first and second for first, second in steps) and all(
        one[0] * other[1] != one[1] * other[0] for one, other in combinations(steps, 2)
    )
