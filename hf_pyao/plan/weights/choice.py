"""Chooses how many blocks of frozen weights are streamed, together with the plan for activations.

For a number of streamed blocks the device has so much more memory, and the link so much less time
for activations; the planner finds the fastest plan for these, of all settings of the levers that
are free. So one prediction decides which blocks stay, and which tensors are kept, moved or rebuilt.
The number is searched for between none, the fewest with which any plan fits, and all; of numbers
that are equally fast, the fewest are streamed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from hf_pyao.engine.transfer.ring_schedule import NUM_SLOTS
from hf_pyao.errors import ConfigError
from hf_pyao.levers import Levers
from hf_pyao.plan.options.chosen_levers import ChosenLevers
from hf_pyao.plan.options.lever_choice import LeverChoice
from hf_pyao.plan.solve.planner import Candidate, NoPlanFitsError, Planner
from hf_pyao.plan.solve.steering import MEASURED
from hf_pyao.plan.step.streamed_step import (
    block_bytes,
    streamed_blocks,
    streamed_layers,
    with_streamed_blocks,
)
from hf_pyao.plan.weights.weight_plan import WeightPlan, weight_plan_of

AUTO, OFF = "auto", "off"

TIE = 1.002
"""Numbers of blocks are equally fast where their steps differ by no more than this factor."""

NEARLY = 1.1
"""What a step needs at least is known about: a plan for a given limit may need less. So numbers of
blocks are tried where it exceeds the limit by no more than this factor."""

MOST_ROUNDS = 2
"""How often numbers near to the fastest so far are looked at, at half the distance each time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChosenStreaming:
    """How many blocks are streamed, and the plan beside."""

    weights: WeightPlan
    levers: ChosenLevers
    """The plan for activations; ``levers.fits`` is False where nothing fits at all."""


class StreamingChoice:
    """Chooses for one recorded step.

    Numbers of blocks are compared by the step as it is configured, or, where that does not fit with
    all blocks streamed, by the setting of the levers that does. The one that is chosen is planned
    with all settings.

    Args:
        resident: chooses plan and levers for the step with all weights on the device. What its
            planner allows on the host is for masters and activations together.
        stream_weights: as ``PyAOConfig.stream_weights``: ``"off"``, ``"auto"``, or how many stay.
    """

    def __init__(self, resident: LeverChoice, stream_weights: int | str = AUTO) -> None:
        self.resident = resident
        self._stream_weights = stream_weights
        self._sizes = block_bytes(resident.configured.program)
        self._host_limit_bytes = resident.configured.host_limit_bytes
        self._planners: dict[tuple[Levers, int], Planner] = {}
        self._choices: dict[int, LeverChoice] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks that can be streamed."""
        return sum(nbytes > 0 for nbytes in self._sizes)

    def checked(self) -> StreamingChoice:
        """Return this, where it can do what it is asked for.

        Raises:
            ConfigError: weights are to be streamed, and no layer has frozen ones.
        """
        if self._stream_weights != OFF and not self.num_blocks:
            raise ConfigError(
                "no layer has frozen weights, so that none can be streamed.",
                key="nothing-to-stream",
            )
        return self

    @property
    def num_given(self) -> int | None:
        """Blocks that are streamed as it was given; None where that is to be chosen."""
        if not self.num_blocks or self._stream_weights == OFF:
            return 0
        if isinstance(self._stream_weights, int):
            return max(0, self.num_blocks - self._stream_weights)
        return None

    @property
    def may_stream(self) -> bool:
        """True if a plan says how many blocks are streamed: that is given, or to be chosen."""
        return self.num_blocks > 0 and self._stream_weights != OFF

    def resident_bytes(self, num_resident: int | None = None) -> int:
        """Return what is on the device throughout with *num_resident* layers' blocks; None: all."""
        program = self.resident.configured.program
        if num_resident is None:
            return program.resident_bytes
        layers = self._layers(max(0, self.num_blocks - num_resident))
        return program.resident_bytes - with_streamed_blocks(program, layers).streamed.saved_bytes

    @property
    def least_resident_bytes(self) -> int:
        """Bytes that are on the device throughout, with as few blocks resident as may be."""
        number = self._most() if self.num_given is None else self.num_given
        return self.resident_bytes(self.num_blocks - number)

    def best(self, limit_bytes: float, least_streamed: int = 0) -> ChosenStreaming:
        """Return the fastest choice within *limit_bytes*.

        Where nothing fits: all blocks streamed that the host has room for, and the least peak.

        Args:
            limit_bytes: what the device may hold.
            least_streamed: blocks that are streamed at least.
        """
        if self.num_given is not None:
            return _streaming(self.at(self.num_given, limit_bytes))
        return self._best(limit_bytes, least_streamed)

    def _best(self, limit_bytes: float, least_streamed: int) -> ChosenStreaming:
        most = max(self._most(), least_streamed)
        levers = self.resident.levers
        if self._needed_bytes(levers, most, limit_bytes) > limit_bytes:
            chosen = self.at(most, limit_bytes)
            if not chosen.fits:
                return _streaming(chosen)
            levers = chosen.levers
        found: dict[int, float] = {}
        for number in self._numbers(levers, most, limit_bytes, found):
            if number not in found and number >= least_streamed:
                planner = self._planner(levers, number)
                # No plan is faster than the one that keeps all activations.
                if _may_be_better(number, planner.kept.step_ms, found):
                    with suppress(NoPlanFitsError):
                        found[number] = planner.best(limit_bytes).step_ms
        number = _fewest_of_the_fastest(found) if found else most
        return _streaming(self.at(number, limit_bytes))

    def fewest_streamed(self, candidate: Candidate, limit_bytes: float) -> int:
        """Return the fewest streamed blocks with which a plan for activations fits.

        All that the host has room for, where none do.

        Args:
            candidate: a plan of the configured step with all weights resident.
            limit_bytes: what the device may hold.
        """
        most = self._most()
        numbers: list[int] = [0, *range(self._fewest, most)]
        for number in numbers:
            if self.fits(candidate, number, limit_bytes):
                return number
        return most

    def fits(self, candidate: Candidate, num_streamed: int, limit_bytes: float) -> bool:
        """Say whether a plan for activations fits with *num_streamed* blocks streamed.

        Args:
            candidate: a plan of the configured step with all weights resident.
            num_streamed: blocks.
            limit_bytes: what the device may hold.
        """
        resident_bytes = self.resident_bytes(self.num_blocks - num_streamed)
        saved_bytes = self.resident_bytes() - resident_bytes
        needed_bytes = candidate.memory.needed_within(limit_bytes + saved_bytes)
        return needed_bytes - saved_bytes <= limit_bytes

    def at(self, num_streamed: int, limit_bytes: float) -> ChosenLevers:
        """Return the best plan with so many blocks streamed, of all settings of the levers.

        Args:
            num_streamed: blocks.
            limit_bytes: what the device may hold.
        """
        return self.with_streamed(num_streamed).best(limit_bytes)

    def with_streamed(self, num_streamed: int) -> LeverChoice:
        """Return what chooses for the step with so many blocks streamed."""
        resident, layers = self.resident, self._layers(num_streamed)
        if not layers:
            return resident
        if num_streamed not in self._choices:
            self._choices[num_streamed] = LeverChoice(
                resident.levers,
                resident.configured.streaming(layers),
                lambda levers: resident.planner_for(levers).streaming(layers),
                resident.room,
            )
        return self._choices[num_streamed]

    def _numbers(
        self, levers: Levers, most: int, limit_bytes: float, found: Mapping[int, float]
    ) -> Iterator[int]:
        """Yield the numbers to look at, one after the other; *found* has what they came to."""
        if most < self._fewest or self._needed_bytes(levers, 0, limit_bytes) <= limit_bytes:
            yield 0
        if most < self._fewest:
            return
        least = next(
            (
                number
                for number in range(self._fewest, most)
                if self._needed_bytes(levers, number, limit_bytes) <= limit_bytes
            ),
            most,
        )
        yield least
        while (
            least in found
            and least > self._fewest
            and self._needed_bytes(levers, least - 1, limit_bytes) <= NEARLY * limit_bytes
        ):
            yield least - 1
            if least - 1 not in found:
                break
            least -= 1
        yield most
        stride = most - least
        for _ in range(MOST_ROUNDS):
            stride = (stride + 1) // 2
            near = _fewest_of_the_fastest({n: found[n] for n in found if n}) or most
            for number in (near - stride, near + stride):
                if least <= number <= most:
                    yield number

    def _needed_bytes(self, levers: Levers, num_streamed: int, limit_bytes: float) -> int:
        """Return about the least that a step needs of the device."""
        least = self.resident.planner_for(levers).least()
        # Weights are there throughout: whatever stays adds what it takes.
        saved_bytes = self._planner(levers, num_streamed).program.streamed.saved_bytes
        return least.memory.needed_within(limit_bytes + saved_bytes) - saved_bytes

    def _most(self) -> int:
        """Return how many blocks the host, and the disk below it, have room for."""
        if self.resident.configured.conditions.link.disk is not None:
            return self.num_blocks
        largest: int = max(self._sizes, default=0)
        if largest and self._host_limit_bytes < self.num_blocks * largest:
            most = int(self._host_limit_bytes // largest)
            return most if most >= self._fewest else 0
        return self.num_blocks

    @functools.cached_property
    def _fewest(self) -> int:
        """The fewest streamed blocks that free memory: with fewer, the ring takes as much."""
        program = self.resident.configured.program
        return next(
            (
                number
                for number in range(1, self.num_blocks + 1)
                if streamed_blocks(program, self._layers(number)).saved_bytes > 0
            ),
            NUM_SLOTS + 1,
        )

    def _layers(self, num_streamed: int) -> list[int]:
        with_frozen = [layer for layer, nbytes in enumerate(self._sizes) if nbytes]
        return [with_frozen[n] for n in streamed_layers(len(with_frozen), num_streamed)]

    def _planner(self, levers: Levers, num_streamed: int) -> Planner:
        """Return the planner by which numbers of blocks are compared: at the speeds as given."""
        key = (levers, num_streamed)
        if key not in self._planners:
            planner = self.resident.planner_for(levers)
            self._planners[key] = planner.streaming(self._layers(num_streamed), MEASURED)
        return self._planners[key]


def _fewest_of_the_fastest(step_ms: Mapping[int, float]) -> int:
    """Return the fewest streamed blocks that are about as fast as the fastest; 0 of none."""
    best_ms = min(step_ms.values(), default=0.0)
    return min((number for number, ms in step_ms.items() if ms <= TIE * best_ms), default=0)


def _streaming(levers: ChosenLevers) -> ChosenStreaming:
    return ChosenStreaming(weights=weight_plan_of(levers.planner.program), levers=levers)


def _may_be_better(number: int, least_ms: float, found: Mapping[int, float]) -> bool:
    """Say whether *number* may be faster than those *found*, or as fast with fewer blocks.

    Args:
        number: of streamed blocks.
        least_ms: the step takes no less with it.
        found: times of the numbers that were looked at.
    """
    best_ms = min(found.values(), default=math.inf)
    if number < _fewest_of_the_fastest(found):
        return least_ms <= best_ms * TIE
    return least_ms * TIE < best_ms
