"""What is dropped and runs again in a predicted step: its time, its memory, and what it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_pyao.plan.predict.predicted_copies import PredictedReloads
from hf_pyao.plan.predict.predicted_memory import PredictedMemory
from hf_pyao.plan.predict.predicted_uploads import PredictedUploads
from hf_pyao.plan.predict.step_clock import StepClock
from hf_pyao.plan.step.prediction import WORKSPACE, Rebuild
from hf_pyao.plan.step.step_program import StepProgram


class PredictedRebuilds:
    """The rebuilds of a step. As in the engine, each operation waits for what it reads itself.

    Args:
        program: the step.
        rebuilds: what it takes to rebuild slots that are dropped, by number.
        leaves: for each slot, whether it leaves the device.
        clock: when copies are done; None: no times are predicted.
        memory: of the device.
        reloads: slots on their way back.
        uploads: streamed weights.
    """

    def __init__(
        self,
        program: StepProgram,
        rebuilds: Mapping[int, Rebuild],
        leaves: Sequence[bool],
        clock: StepClock | None,
        memory: PredictedMemory,
        reloads: PredictedReloads,
        uploads: PredictedUploads,
    ) -> None:
        self.elapsed_ms = 0.0
        """What they have taken so far."""
        self.read_first = {
            number
            for rebuild in rebuilds.values()
            for each in rebuild.operations
            for number in each.reads
            if program.slots[number].is_read_first
        }
        """Slots that are asked for first while another is rebuilt."""
        self._operations = program.operations
        self._rebuilds = rebuilds
        self._leaves = leaves
        self._clock = clock
        self._memory = memory
        self._reloads = reloads
        self._uploads = uploads
        self._done: set[int] = set()
        self._made_at: dict[int, int] = {}
        """Buffers that were made and are there, and since which operation."""

    def use(self, number: int) -> None:
        """Run again what makes a dropped slot, when it is asked for first; ask for what is next."""
        if number not in self._done:
            self._done.add(number)
            self._run(number, self._rebuilds[number])
        self._reloads.prefetch()

    def free(self, buffer: int) -> None:
        """Free a buffer that was made, unless that was done when an operation had read it."""
        start = self._made_at.pop(buffer, None)
        if start is not None:
            self._memory.unmake(buffer)
            self._memory.end_lifetime(buffer, start)

    def _run(self, number: int, rebuild: Rebuild) -> None:
        memory = self._memory
        done_ms = 0.0
        """Of the operations since the last that read something."""
        for again in rebuild.operations:
            blocks = self._uploads.read_by.get(again.operation, ())
            reads = [each for each in again.reads if self._leaves[each]]
            if blocks or reads:
                self._advance(done_ms)
                done_ms = 0.0
            for block in blocks:
                self._uploads.read(block)
            for each in reads:
                self._reloads.use(each, is_read=True)
            memory.make(again.makes)
            for buffer in again.makes:
                self._made_at[buffer] = memory.operation
            inside_bytes = again.beside_bytes + self._operations[again.operation].workspace_bytes
            if inside_bytes:
                memory.allocate((WORKSPACE, number), inside_bytes)
                memory.free((WORKSPACE, number))
            for buffer in again.frees:
                self.free(buffer)
            done_ms += again.elapsed_ms
        self._advance(done_ms)

    def _advance(self, elapsed_ms: float) -> None:
        if self._clock is not None:
            self._clock.advance(elapsed_ms)
            self.elapsed_ms += elapsed_ms
