"""Times micro-batches under a plan, and compares them with those of offloading everything."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.engine.runtime.observer import Observer
from hf_pyao.metrics import MicroBatchStats
from hf_pyao.plan.measure.segment_memory import SegmentMemory
from hf_pyao.plan.solve.correction import ExpectedTimes

LOSES = 1.05
"""By how much slower than its fallback a plan may measure: less than that is noise."""

NUM_UNCOUNTED = 1
"""Micro-batches at the start that are not counted, unless there are no others: the first one runs
just after the policy has changed, or is the first of the run."""


class TimedMicroBatch(NamedTuple):
    """One micro-batch."""

    num_elements: int
    """Of its batch."""
    layers_ms: float
    """From the first layer's forward to the end of its backward."""
    stall_ms: float
    """Of them, waiting for copies."""
    forward_ms: float = 0.0
    """Of ``layers_ms``, until the first backward of a layer: the head lies before it; 0 if that is
    not known."""
    stall_forward_ms: float = 0.0
    """Of ``forward_ms``, waiting for copies."""

    @property
    def compute_ms(self) -> float:
        """Without waiting for copies."""
        return self.layers_ms - self.stall_ms

    @property
    def compute_forward_ms(self) -> float:
        """Of :attr:`compute_ms`, until the first backward of a layer."""
        return self.forward_ms - self.stall_forward_ms

    @property
    def compute_backward_ms(self) -> float:
        """Of :attr:`compute_ms`, after it."""
        return self.compute_ms - self.compute_forward_ms


class PlanCheck(Observer):
    """Times some micro-batches, by a few marks each.

    Args:
        engine: what is timed.
        device: where the model is.
        num_micro_batches: how many are counted.
        num_sampled: says how many forwards were checked for second runs. Micro-batches with such a
            forward take longer than others, and are not counted.
        gradient_bytes: as :class:`SegmentMemory` takes it.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        device: torch.device,
        num_micro_batches: int,
        num_sampled: Callable[[], int] = lambda: 0,
        gradient_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._engine = weakref.ref(engine)
        self._device = device
        self._gradient_bytes = gradient_bytes
        self._memory = SegmentMemory(device, gradient_bytes)
        self._transport = engine.link.transport
        self._num_left = num_micro_batches
        self._num_sampled = num_sampled
        self._num_sampled_before = num_sampled()
        self._forward: int | None = None
        self._start: Any = None
        self._turn: Any = None
        self._end: Any = None
        self._spans: list[_Span] = []
        self._stalls_ms = engine.upload_stalls_ms()
        """Waits for streamed weights until the newest micro-batch's end."""
        self._num_elements = 0
        """Of the batch that runs."""
        self.is_done = False
        """True when enough were timed."""

    def note_size(self, num_elements: int) -> None:
        """Note the elements of the batch that is about to run."""
        self._num_elements = num_elements
        self._memory.at_start()

    def start(self) -> None:
        """Begin, with the next layer call."""
        self._memory.at_start()
        engine = self._engine()
        if engine is not None:
            engine.observe_too(self)

    def stop(self) -> None:
        """Hear no more. Twice is fine."""
        engine = self._engine()
        if engine is not None:
            engine.stop_observing(self)

    def on_module(self, layer: str, path: str, phase: str, *, is_start: bool) -> None:
        """Note the start of a forward's first layer, of the first backward, and its every end."""
        engine = self._engine()
        if path or self.is_done or engine is None:
            return
        self._memory.at_border(phase, is_start=is_start)
        if phase == "forward":
            forward = engine.num_forwards
            # One that failed, or was never gone back through, counts for nothing.
            is_new = forward != self._forward and self._end is None
            if is_start and (self._start is None or is_new):
                self._forward = forward
                self._turn = None
                self._start = self._transport.mark(self._device)
        elif self._start is None:
            return
        elif not is_start:
            self._end = self._transport.mark(self._device)
        elif self._turn is None:
            self._turn = self._transport.mark(self._device)

    def on_micro_batch(self, stats: MicroBatchStats) -> None:
        """Count it."""
        engine = self._engine()
        before_ms = self._stalls_ms
        stalls_ms = before_ms if engine is None else engine.upload_stalls_ms()
        self._stalls_ms = stalls_ms
        uploads_ms = stalls_ms[0] - before_ms[0], stalls_ms[1] - before_ms[1]
        start, turn, end = self._start, self._turn, self._end
        self._start = self._turn = self._end = None
        num_sampled = self._num_sampled()
        is_sampled = num_sampled != self._num_sampled_before
        self._num_sampled_before = num_sampled
        if is_sampled:  # a check holds more than the step itself
            self._memory = SegmentMemory(self._device, self._gradient_bytes)
        else:
            self._memory.end()
        if start is None or end is None or is_sampled:
            return
        self._spans.append(_Span(self._num_elements, start, turn, end, stats, uploads_ms))
        self._num_left -= 1
        self.is_done = self._num_left <= 0

    @property
    def memory(self) -> SegmentMemory:
        """What tensors took in the first that counts."""
        return self._memory

    def result(self) -> list[TimedMicroBatch]:
        """Return what was timed. Waits for the device."""
        counted = self._spans[NUM_UNCOUNTED:] or self._spans
        if counted and self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        engine = self._engine()
        if engine is not None:
            engine.figures.settle_times()
        return [self._timed(span) for span in counted]

    def _timed(self, span: _Span) -> TimedMicroBatch:
        elapsed_ms = self._transport.elapsed_ms
        stall_forward_ms = span.stats.stall_forward_ms + max(0.0, span.uploads_ms[0])
        stall_backward_ms = span.stats.stall_backward_ms + max(0.0, span.uploads_ms[1])
        return TimedMicroBatch(
            span.num_elements,
            elapsed_ms(span.start, span.end),
            stall_forward_ms + stall_backward_ms,
            0.0 if span.turn is None else elapsed_ms(span.start, span.turn),
            stall_forward_ms,
        )


class _Span(NamedTuple):
    """A micro-batch by its marks."""

    num_elements: int
    start: Any
    turn: Any
    """Where backward begins; None if that was not heard."""
    end: Any
    stats: MicroBatchStats
    """Complete once the device has run it and the engine's times are settled."""
    uploads_ms: tuple[float, float]
    """Waits for streamed weights that became known during it, in forward and backward."""


def typical(timed: Sequence[TimedMicroBatch]) -> TimedMicroBatch:
    """Return the medians of some micro-batches."""
    return TimedMicroBatch(
        max(each.num_elements for each in timed),
        median(each.layers_ms for each in timed),
        median(each.stall_ms for each in timed),
        median(each.forward_ms for each in timed),
        median(each.stall_forward_ms for each in timed),
    )


def loses(
    timed: Sequence[TimedMicroBatch], fallback: Sequence[TimedMicroBatch]
) -> tuple[float, float] | None:
    """Say whether a plan is slower than its fallback, beyond what noise may be.

    A micro-batch is compared with those of the fallback that were not smaller; all that can be
    compared must have been slower.

    Args:
        timed: of the plan.
        fallback: of the fallback.

    Returns:
        The least ms of the plan, and the fallback's for it; None: it is not known to lose.
    """
    worst: tuple[float, float] | None = None
    for each in timed:
        others = [one.layers_ms for one in fallback if one.num_elements >= each.num_elements]
        if not others:
            continue
        other_ms = median(others)
        if each.layers_ms <= other_ms * LOSES:
            return None
        if worst is None or each.layers_ms < worst[0]:
            worst = each.layers_ms, other_ms
    return worst


def measured_figures(
    timed: Sequence[TimedMicroBatch], expected: ExpectedTimes | None
) -> dict[str, float]:
    """Return what a plan came to, as a report holds it; empty if it was not timed."""
    if not timed:
        return {}
    found = typical(timed)
    return {
        "measured_layers_ms": found.layers_ms,
        "measured_compute_ms": found.compute_ms,
        "measured_stall_ms": found.stall_ms,
        **({} if expected is None else expected.figures()),
    }
