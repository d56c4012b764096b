"""Device memory of a predicted step: what is allocated, what holds it, and when it is freed."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence, Set

from hf_pyao.plan.step.prediction import FREED, WORKSPACE, Lifetime, MemoryEvent, MemoryKey
from hf_pyao.plan.step.step_program import StepProgram

Event = tuple[Callable[[int], None], int]
"""What happens, and to which slot, buffer or segment."""


class PredictedMemory:
    """The device memory of one step.

    A buffer is freed when its operations are over (:meth:`die`) and nothing else holds it: saved
    tensors that stay, and copies to the host that are under way.

    Args:
        program: the step.
    """

    def __init__(self, program: StepProgram) -> None:
        self.live_bytes = program.resident_bytes
        self.operation = 0
        """The operation that is predicted."""
        self.peaks: list[int] = []
        """By operation, the most bytes since the one before."""
        self.events: list[MemoryEvent] = []
        self.lifetimes: list[Lifetime] = []
        self._operations = program.operations
        self._buffers = program.buffers
        self._births: list[list[int]] = [[] for _ in program.operations]
        self._deaths: list[list[int]] = [[] for _ in program.operations]
        self._peak_bytes = 0
        self._allocated: dict[MemoryKey, int] = {}
        """What is there and is no buffer of the program."""
        self._num_holders = [0] * len(program.buffers)
        self._is_dead = [False] * len(program.buffers)

    def plan(self, made_again: Container[int], kept: Container[int]) -> None:
        """Say which buffers :meth:`run` neither makes nor lets go, and which it makes alone."""
        births, deaths = self._births, self._deaths
        num_operations = len(births)
        for number, (_, birth, death) in enumerate(self._buffers):
            if number not in made_again:
                if 0 <= birth < num_operations:
                    births[birth].append(number)
                if 0 <= death < num_operations and number not in kept:
                    deaths[death].append(number)

    def end_with(self, operation: int, buffers: Sequence[int]) -> None:
        """Let *buffers* go with *operation*, behind all others."""
        if 0 <= operation < len(self._deaths):
            self._deaths[operation] += buffers
        else:
            for buffer in buffers:
                self.hold(buffer)  # until the step ends

    def run(self, first: int, end: int, between: Sequence[Event] = ()) -> None:
        """Run operations, and note the peak of each since the one before.

        Args:
            first: number of the first.
            end: of the one behind the last.
            between: what happens, and to what, where the first has let buffers go, and not made
                others yet.
        """
        births, deaths, operations = self._births, self._deaths, self._operations
        buffers, is_dead, num_holders = self._buffers, self._is_dead, self._num_holders
        events, lifetimes, peaks = self.events, self.lifetimes, self.peaks
        live_bytes, peak_bytes = self.live_bytes, self._peak_bytes
        for number in range(first, end):
            for buffer in deaths[number]:
                is_dead[buffer] = True
                if not num_holders[buffer]:
                    nbytes, birth, _ = buffers[buffer]
                    events.append((buffer, FREED))
                    live_bytes -= nbytes
                    lifetimes.append((buffer, birth, number))
            if between:
                self.live_bytes = live_bytes
                for event, subject in between:
                    event(subject)
                live_bytes, peak_bytes = self.live_bytes, self._peak_bytes
                between = ()
            for buffer in births[number]:
                nbytes = buffers[buffer][0]
                events.append((buffer, nbytes))
                live_bytes += nbytes
                if live_bytes > peak_bytes:
                    peak_bytes = live_bytes
            if inside_bytes := operations[number].workspace_bytes:
                events.append(((WORKSPACE, number), inside_bytes))
                events.append(((WORKSPACE, number), FREED))
                if live_bytes + inside_bytes > peak_bytes:
                    peak_bytes = live_bytes + inside_bytes
            peaks.append(peak_bytes if peak_bytes > live_bytes else live_bytes)
            peak_bytes = 0
        self.live_bytes, self._peak_bytes = live_bytes, 0

    def allocate(self, key: MemoryKey, nbytes: int) -> None:
        """Allocate *nbytes* for *key*, which is no buffer of the program."""
        self._allocated[key] = nbytes
        self._allocate(key, nbytes)

    def free(self, key: MemoryKey) -> None:
        """Free what was allocated for *key*."""
        self.events.append((key, FREED))
        self.live_bytes -= self._allocated.pop(key)

    def make(self, buffers: Sequence[int]) -> None:
        """Allocate *buffers* of the program, one after the other."""
        for buffer in buffers:
            self._allocate(buffer, self._buffers[buffer].nbytes)

    def unmake(self, buffer: int) -> None:
        """Free a buffer that was made for a while."""
        self.events.append((buffer, FREED))
        self.live_bytes -= self._buffers[buffer].nbytes

    def hold(self, buffer: int) -> None:
        """Keep *buffer* beyond its operations; -1 is none."""
        if buffer >= 0:
            self._num_holders[buffer] += 1

    def let_go(self, buffer: int) -> None:
        """End one :meth:`hold`."""
        if buffer < 0:
            return
        self._num_holders[buffer] -= 1
        if self._is_dead[buffer] and not self._num_holders[buffer]:
            self.die(buffer)

    def die(self, buffer: int) -> None:
        """Free *buffer*, whose operations are over, and which nothing holds."""
        self.events.append((buffer, FREED))
        self.live_bytes -= self._buffers[buffer].nbytes
        self.end_lifetime(buffer, self._buffers[buffer].birth)

    def end_lifetime(self, buffer: int, start: int) -> None:
        """Note that *buffer* was there from operation *start* until now."""
        self.lifetimes.append((buffer, start, self.operation))

    def finish(self, made_again: Set[int]) -> None:
        """Note the lifetimes of what is left when the step ends.

        Args:
            made_again: buffers that are reloaded or rebuilt, whose lifetimes are noted elsewhere.
        """
        operation, num_holders = self.operation, self._num_holders
        for number, buffer in enumerate(self._buffers):
            is_there = buffer.death >= operation or num_holders[number] > 0
            if is_there and number not in made_again:
                self.end_lifetime(number, buffer.birth)

    def _allocate(self, key: MemoryKey, nbytes: int) -> None:
        self.events.append((key, nbytes))
        live_bytes = self.live_bytes = self.live_bytes + nbytes
        if live_bytes > self._peak_bytes:
            self._peak_bytes = live_bytes
