"""Uploads of streamed blocks in a predicted step: the engine's ring, on the predictor's clock."""

from __future__ import annotations

from hf_pyao.engine.transfer.ring_schedule import RingSchedule
from hf_pyao.plan.predict.copy_lanes import RELOAD, Copy
from hf_pyao.plan.predict.step_clock import StepClock
from hf_pyao.plan.step.step_program import BACKWARD, FORWARD, OUTSIDE, Segment, StepProgram


class PredictedUploads(RingSchedule):
    """The ring of a step.

    Args:
        program: the step.
        clock: when copies are done; None: uploads are counted alone.
        is_first_step: the ring is empty when the step begins; False: it holds what an equal step
            has left there.
    """

    def __init__(
        self, program: StepProgram, clock: StepClock | None, *, is_first_step: bool
    ) -> None:
        streamed = program.streamed
        super().__init__(len(streamed.layers), streamed.num_slots)
        self.copies: list[Copy] = []
        """The uploads, in order; none without a clock."""
        self.counted: list[tuple[str, int]] = []
        """The same: the pass that each is queued in, and its bytes."""
        self._phase = FORWARD
        self._segments = program.segments
        self._runs_back = any(each.phase == BACKWARD for each in program.segments)
        self._layers = streamed.layers
        self._layer_bytes = streamed.layer_bytes
        self._blocks = {layer: block for block, layer in enumerate(streamed.layers)}
        self._clock: StepClock | None = None
        self._under_way: dict[int, Copy] = {}
        if not is_first_step and streamed:
            self.begin(trains=self._runs_back)
            self.run()
        self._clock = clock
        self.counted = []
        self._phase = FORWARD
        self.begin(trains=self._runs_back)
        self.ahead()

    @property
    def uploaded_bytes(self) -> int:
        """Bytes that were uploaded."""
        return sum(copy.nbytes for copy in self.copies)

    def run(self) -> None:
        """Go through the whole step."""
        for segment in self._segments:
            self.enter(segment)
            self.ahead()

    def enter(self, segment: Segment) -> None:
        """Note that *segment* begins."""
        self._phase = segment.phase
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
        layer = self._layers[block]
        nbytes = self._layer_bytes[layer]
        self.counted.append((self._phase, nbytes))
        if self._clock is None:
            return
        copy = Copy(RELOAD, nbytes, self._clock.now_ms, layer=layer)
        self._clock.book(copy)
        self._under_way[block] = copy
        self.copies.append(copy)


def uploads_of(program: StepProgram, *, is_first_step: bool = False) -> list[tuple[str, int]]:
    """Return the uploads of a step, in order: the pass in which each is queued, and its bytes.

    Args:
        program: the step.
        is_first_step: as for :class:`PredictedUploads`.
    """
    uploads = PredictedUploads(program, None, is_first_step=is_first_step)
    uploads.run()
    return uploads.counted
