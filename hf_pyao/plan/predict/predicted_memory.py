"""Device memory of a predicted step: what is allocated, what holds it, and when it is freed."""

from __future__ import annotations

from collections.abc import Set

from hf_pyao.plan.step.prediction import BUFFER, FREED, Lifetime, MemoryEvent, MemoryKey
from hf_pyao.plan.step.step_program import StepProgram


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
        self.events: list[MemoryEvent] = []
        self.lifetimes: list[Lifetime] = []
        self._program = program
        self._peak_bytes = 0
        self._allocated: dict[MemoryKey, int] = {}
        self._num_holders = [0] * len(program.buffers)
        self._is_dead = [False] * len(program.buffers)

    def begin(self, operation: int) -> None:
        """Go on to *operation*: a peak is looked for anew."""
        self.operation = operation
        self._peak_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """Most bytes since :meth:`begin`."""
        return max(self._peak_bytes, self.live_bytes)

    def allocate(self, key: MemoryKey, nbytes: int) -> None:
        """Allocate *nbytes* for *key*."""
        self.events.append(MemoryEvent(key, nbytes))
        self._allocated[key] = nbytes
        self.live_bytes += nbytes
        if self.live_bytes > self._peak_bytes:
            self._peak_bytes = self.live_bytes

    def free(self, key: MemoryKey) -> None:
        """Free what was allocated for *key*."""
        self.events.append(MemoryEvent(key, FREED))
        self.live_bytes -= self._allocated.pop(key)

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
            self._free_buffer(buffer)

    def die(self, buffer: int) -> None:
        """End the operations of *buffer*."""
        self._is_dead[buffer] = True
        if not self._num_holders[buffer]:
            self._free_buffer(buffer)

    def end_lifetime(self, buffer: int, start: int) -> None:
        """Note that *buffer* was there from operation *start* until now."""
        self.lifetimes.append(Lifetime(buffer, start, self.operation))

    def finish(self, made_again: Set[int]) -> None:
        """Note the lifetimes of what is left when the step ends.

        Args:
            made_again: buffers that are reloaded or rebuilt, whose lifetimes are noted elsewhere.
        """
        for number, buffer in enumerate(self._program.buffers):
            is_there = buffer.death >= self.operation or self._num_holders[number] > 0
            if is_there and number not in made_again:
                self.end_lifetime(number, buffer.birth)

    def _free_buffer(self, buffer: int) -> None:
        self.free((BUFFER, buffer))
        self.end_lifetime(buffer, self._program.buffers[buffer].birth)
