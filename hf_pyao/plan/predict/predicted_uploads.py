"""Uploads of streamed blocks in a predicted step: the engine's ring, on the predictor's clock."""

from __future__ import annotations

from hf_pyao.engine.transfer.ring_schedule import RingSchedule
from hf_pyao.plan.predict.copy_lanes import RELOAD, Copy
from hf_pyao.plan.predict.step_clock import StepClock
from hf_pyao.plan.step.step_program import BACKWARD, OUTSIDE, Segment, StepProgram


class PredictedUploads(RingSchedule):
    """The ring of a step.

    Args:
        program: the step.
        clock: when copies are done.
        is_first_step: the ring is empty when the step begins; False: it holds what an equal step
            has left there.
    """

    def __init__(self, program: StepProgram, clock: StepClock, *, is_first_step: bool) -> None:
        streamed = program.streamed
        super().__init__(len(streamed.layers), streamed.num_slots)
        self.copies: list[Copy] = []
        """The uploads, in order."""
        self._layers = streamed.layers
        self._layer_bytes = streamed.layer_bytes
        self._blocks = {layer: block for block, layer in enumerate(streamed.layers)}
        self._clock: StepClock | None = None
        self._under_way: dict[int, Copy] = {}
        if not is_first_step and streamed:
            self.begin(trains=True)
            for segment in program.segments:
                self.enter(segment)
                self.ahead()
        self._clock = clock
        self.begin(trains=True)
        self.ahead()

    @property
    def uploaded_bytes(self) -> int:
        """Bytes that were uploaded."""
        return sum(copy.nbytes for copy in self.copies)

    def enter(self, segment: Segment) -> None:
        """Note that *segment* begins."""
        block = self._blocks.get(segment.layer)
        in_backward = segment.phase == BACKWARD
        if block is not None:
            self.use(block, in_backward=in_backward)
        elif segment.layer != OUTSIDE:
            self.leave(in_backward=in_backward)

    def wait(self) -> None:
        """Let compute wait for the block in use."""
        if self.current in self._under_way and self._clock is not None:
            self._clock.wait(self._under_way.pop(self.current))

    def upload(self, block: int, slot: int) -> None:
        """Queue the copy of *block*."""
        if self._clock is None:
            return  # of the step before
        layer = self._layers[block]
        copy = Copy(RELOAD, self._layer_bytes[layer], self._clock.now_ms, layer=layer)
        self._clock.book(copy)
        self._under_way[block] = copy
        self.copies.append(copy)
