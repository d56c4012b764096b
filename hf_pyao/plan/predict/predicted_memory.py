"""Device memory of a predicted step: what is allocated, what holds it, and when it is freed."""

from __future__ import annotations

from collections.abc import Sequence, Set

from hf_pyao.plan.step.prediction import FREED, Lifetime, MemoryEvent, MemoryKey
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
        self._buffers = program.buffers
        self._peak_bytes = 0
        self._allocated: dict[MemoryKey, int] = {}
        """What is there and is no buffer of the program."""
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
            self._free_buffers((buffer,))

    def die(self, buffers: Sequence[int]) -> None:
        """End the operations of *buffers*, one after the other."""
        is_dead, num_holders = self._is_dead, self._num_holders
        free = []
        for buffer in buffers:
            is_dead[buffer] = True
            if not num_holders[buffer]:
                free.append(buffer)
        self._free_buffers(free)

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

    def _free_buffers(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            buffer = self._buffers[number]
            self.events.append((number, FREED))
            self.live_bytes -= buffer.nbytes
            self.lifetimes.append((number, buffer.birth, self.operation))
