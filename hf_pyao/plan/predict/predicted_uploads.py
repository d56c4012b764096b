"""Uploads of streamed blocks in a predicted step: the engine's ring, on the predictor's clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from hf_pyao.engine.transfer.ring_schedule import RingSchedule
from hf_pyao.plan.predict.copy_lanes import RELOAD, Copy
from hf_pyao.plan.predict.step_clock import StepClock
from hf_pyao.plan.step.step_program import (
    BACKWARD,
    FORWARD,
    OUTSIDE,
    Segment,
    StepProgram,
    WeightRead,
)
from hf_pyao.plan.step.streamed_blocks import WeightBlock


class PredictedUploads(RingSchedule):
    """The ring of a step.

    Args:
        program: the step.
        clock: when copies are done; None: uploads are counted alone.
        is_first_step: the ring is empty when the step begins; False: it holds what an equal step
            has left there.
        slower: by what the disk reads weights more slowly, by pass; None: by nothing.
    """

    def __init__(
        self,
        program: StepProgram,
        clock: StepClock | None,
        *,
        is_first_step: bool,
        slower: Mapping[str, float] | None = None,
    ) -> None:
        streamed = program.streamed
        super().__init__(len(streamed.blocks), streamed.num_slots)
        self.copies: list[Copy] = []
        """The uploads, in order; none without a clock."""
        self.counted: list[tuple[str, int, int]] = []
        """The same: the pass that each is queued in, its bytes, and its layer."""
        self._phase = FORWARD
        self._segments = program.segments
        self._runs_back = any(each.phase == BACKWARD for each in program.segments)
        self._blocks = streamed.blocks
        self._on_disk = frozenset(streamed.disk_layers)
        self._staging_bytes = streamed.staging_bytes
        self._slower = {} if slower is None else slower
        self._of_layer: defaultdict[int, list[int]] = defaultdict(list)
        for block, (layer, _) in enumerate(streamed.blocks):
            self._of_layer[layer].append(block)
        self.read_by = self._blocks_by_operation(program)
        """Blocks of layers with several, by number of the operation that reads them, in order."""
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
            if len(self._of_layer.get(segment.layer, ())) > 1:
                for operation in range(segment.start, segment.end):
                    for block in self.read_by.get(operation, ()):
                        self.read(block)

    def enter(self, segment: Segment) -> None:
        """Note that *segment* begins.

        Of several blocks of a layer the first comes as its forward begins, and the others when they
        are read.
        """
        self._phase = segment.phase
        blocks = self._of_layer.get(segment.layer, ())
        in_backward = segment.phase == BACKWARD
        if blocks:
            if not (in_backward and len(blocks) > 1):
                self.use(blocks[0], in_backward=in_backward)
        elif segment.layer != OUTSIDE:
            self.leave(in_backward=in_backward)

    def read(self, block: int) -> None:
        """Have *block*, which an operation is about to read, and let compute wait for it."""
        self.use(block, in_backward=self._phase == BACKWARD)
        self.ahead()
        self.wait()

    def wait(self) -> None:
        """Let compute wait for the block in use."""
        if self.current in self._under_way and self._clock is not None:
            self._clock.wait(self._under_way.pop(self.current))

    def upload(self, block: int, slot: int) -> None:
        """Queue the copy of *block*."""
        layer, (nbytes, *_) = self._blocks[block]
        self.counted.append((self._phase, nbytes, layer))
        if self._clock is None:
            return
        staging_bytes = self._staging_bytes if layer in self._on_disk else 0
        copy = Copy(
            RELOAD,
            nbytes,
            self._clock.now_ms,
            layer=layer,
            staging_bytes=staging_bytes,
            slower=self._slower.get(self._phase, 1.0),
        )
        self._clock.book(copy)
        self._under_way[block] = copy
        self.copies.append(copy)

    def _blocks_by_operation(self, program: StepProgram) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for segment in program.segments:
            of_layer = self._of_layer.get(segment.layer, ())
            if len(of_layer) <= 1:
                continue
            for number in range(segment.start, segment.end):
                if (reads := program.operations[number].reads) is not None:
                    found[number] = self._blocks_of(reads, of_layer)
        return found

    def _blocks_of(self, reads: WeightRead, of_layer: Sequence[int]) -> tuple[int, ...]:
        blocks = [block for block in of_layer if _has(self._blocks[block][1], reads)]
        return tuple(reversed(blocks) if reads.is_backward else blocks)


def _has(block: WeightBlock, reads: WeightRead) -> bool:
    """Say whether *block* has some of what an operation reads."""
    if block.experts != reads.experts:
        return False
    return not reads.experts or (block.first < reads.last and reads.first < block.last)


def uploads_of(program: StepProgram, *, is_first_step: bool = False) -> list[tuple[str, int, int]]:
    """Return the uploads of a step, in order: the pass of each, its bytes, and its layer.

    Args:
        program: the step.
        is_first_step: as for :class:`PredictedUploads`.
    """
    uploads = PredictedUploads(program, None, is_first_step=is_first_step)
    uploads.run()
    return uploads.counted
