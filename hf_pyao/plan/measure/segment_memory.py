"""What is on the device in each segment of a step: measured, and predicted.

Times of a plan's step are measured and corrected; so is its memory. What no prediction knows (what
FSDP2 and ZeRO gather, compiled code, buffers of a user's hooks) is in the measured bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from hf_pyao.metrics import format_bytes
from hf_pyao.plan.step.prediction import Prediction
from hf_pyao.plan.step.step_program import BACKWARD, FORWARD, OUTSIDE, StepProgram

BEFORE = "before"
"""From the start of the model's forward to that of its first layer: what is there then."""

HEAD = "head"
"""From the end of the last layer's forward to the first backward of a layer."""

OPTIMIZER = "optimizer"
"""From the end of the layers' backward to the next forward of a layer. No plan of saved tensors
changes what it takes."""


NOTHING: Mapping[str, int] = MappingProxyType({})


def allocated_and_peak_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes of *device*'s tensors, now and at most so far; None: they are not counted.

    Nothing waits for the device: its memory is allocated as the host goes.
    """
    if device.type in ("cpu", "mps", "meta"):
        return None
    count = torch.accelerator.memory_allocated, torch.accelerator.max_memory_allocated
    return count[0](device), count[1](device)


class SegmentMemory:
    """Most bytes that tensors take in forward, head and backward of one micro-batch, and behind it.

    They are read where a layer's call begins and ends: what is allocated then, and the peak, which
    is this segment's if it has grown since the last look. Nobody's statistics are reset. So peaks
    below those of earlier micro-batches are not seen, and what is found is never too much. What
    lies behind is seen only where it takes more than anything before.

    Args:
        device: where the model is.
        gradient_bytes: returns the bytes of gradients that are there. A predicted step has its own.
    """

    def __init__(self, device: torch.device, gradient_bytes: Callable[[], int] = lambda: 0) -> None:
        self._device = device
        self._gradient_bytes = gradient_bytes
        self._start_bytes: int | None = None
        self._base_bytes: int | None = None
        self._peak_bytes = 0
        self._segment = FORWARD
        self._is_over = self._is_done = False
        self.grown_bytes: dict[str, int] = {}
        """By segment, above what was there when the first layer began, but for gradients. Before
        the first layer: above what was there when the forward began."""
        self.most_bytes: dict[str, int] = {}
        """By segment, what it cannot have been above: the peak so far."""

    def at_start(self) -> None:
        """Look, where a forward begins: weights that training engines divide are not gathered."""
        if self._is_over:
            self._look_behind()
            return
        found = allocated_and_peak_bytes(self._device)
        if found is not None and self._base_bytes is None:
            self._start_bytes = found[0] - self._gradient_bytes()

    def at_border(self, phase: str, *, is_start: bool) -> None:
        """Look, where a layer's forward or backward begins or ends."""
        self._look(FORWARD if is_start and phase == FORWARD else self._segment)
        if is_start:
            self._segment = phase
        elif phase == FORWARD:
            self._segment = HEAD

    def end(self) -> None:
        """Look for the last time in the micro-batch: it is over."""
        if self._base_bytes is not None and not self._is_over:
            self._look(self._segment)
        self._is_over = True

    def _look_behind(self) -> None:
        """Look once more, where the next micro-batch begins."""
        found = None if self._is_done else allocated_and_peak_bytes(self._device)
        self._is_done = True
        if found is not None and self._base_bytes is not None and found[1] > self._peak_bytes:
            self.grown_bytes[OPTIMIZER] = found[1] - self._base_bytes

    def _look(self, segment: str) -> None:
        """Note what has grown in the segment that ends here, or goes on."""
        if self._is_over:
            self._look_behind()
            return
        found = allocated_and_peak_bytes(self._device)
        if found is None:
            return
        allocated_bytes, peak_bytes = found
        if self._base_bytes is None:
            self._base_bytes = allocated_bytes - self._gradient_bytes()
            self._peak_bytes = peak_bytes
            if self._start_bytes is not None:
                self.grown_bytes[BEFORE] = self._base_bytes - self._start_bytes
        seen_bytes = peak_bytes if peak_bytes > self._peak_bytes else allocated_bytes
        self._peak_bytes = peak_bytes
        grown_bytes = seen_bytes - self._base_bytes
        self.grown_bytes[segment] = max(self.grown_bytes.get(segment, 0), grown_bytes)
        self.most_bytes[segment] = peak_bytes - self._base_bytes


def largest(measured: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the most of several micro-batches, or ranks, by segment."""
    found: dict[str, int] = {}
    for each in measured:
        for name, grown_bytes in each.items():
            found[name] = max(found.get(name, grown_bytes), grown_bytes)
    return found


def predicted_growth(program: StepProgram, prediction: Prediction) -> dict[str, int]:
    """Return what :class:`SegmentMemory` is predicted to find for a step.

    Args:
        program: the step.
        prediction: of it.
    """
    live_bytes = prediction.live_bytes
    segments = [each for each in program.segments if each.start < each.end]
    in_layers = [number for number, each in enumerate(segments) if each.layer != OUTSIDE]
    if not in_layers:
        return {}
    first = in_layers[0]
    start = segments[first].start
    base_bytes = live_bytes[start - 1] if start else program.resident_bytes
    found = {BEFORE: base_bytes - program.resident_bytes}
    name = FORWARD
    for number in range(first, len(segments)):
        segment = segments[number]
        if segment.layer != OUTSIDE:
            name = segment.phase
        elif name == FORWARD:
            behind = next((segments[n].phase for n in in_layers if n > number), BACKWARD)
            name = HEAD if behind == BACKWARD else FORWARD
        grown_bytes = max(live_bytes[segment.start : segment.end]) - base_bytes
        found[name] = max(found.get(name, 0), grown_bytes)
    return found


class MeasuredGrowth(NamedTuple):
    """By how much memory grows over a step, by segment: measured, and predicted."""

    measured: Mapping[str, int] = NOTHING
    predicted: Mapping[str, int] = NOTHING

    def figures(self) -> dict[str, float]:
        """Return both as figures of a report; empty where nothing was measured."""
        parts = {"measured_bytes": self.measured, "predicted_bytes": self.predicted}
        return {
            f"{what}/{name}": float(nbytes)
            for what, found in parts.items()
            for name, nbytes in found.items()
        }

    def __str__(self) -> str:
        """Say both in words; empty where nothing was measured."""
        words = []
        for name, nbytes in self.measured.items():
            known = self.predicted.get(name)
            beside = "" if known is None else f" (predicted: {format_bytes(known)})"
            words.append(f"{format_bytes(nbytes)} in {name}{beside}")
        return f"a step was measured to take {', '.join(words)}" if words else ""


def differences(
    measured: Mapping[str, int],
    predicted: Mapping[str, int],
    most_bytes: Mapping[str, int] = NOTHING,
    earlier: Mapping[str, int] = NOTHING,
) -> dict[str, int]:
    """Return by how much a step takes more than is predicted, or less, by segment.

    What is there before the layers stays in all of them. A peak below those of earlier steps is not
    seen: there the difference of an earlier step counts, as far as it can be.

    Args:
        measured: growth by segment.
        predicted: the same.
        most_bytes: what *measured* cannot have been above.
        earlier: what this returned for an earlier step.
    """
    more = {name: measured[name] - predicted[name] for name in measured.keys() & predicted.keys()}
    before_bytes = max(0, more.pop(BEFORE, 0))
    found = {name: before_bytes + each for name, each in more.items()}
    for name in found.keys() & most_bytes.keys() & earlier.keys():
        most = before_bytes + most_bytes[name] - predicted[name]
        found[name] = max(found[name], min(earlier[name], most))
    return found


def unpredicted_bytes(more: Mapping[str, int], predicted: Mapping[str, int]) -> int:
    """Return by how much the peak of a step is above its prediction.

    Args:
        more: what each segment takes beside its prediction, as :func:`differences` says.
        predicted: growth of the step that is asked about, which may be another one.
    """
    known = [name for name in more if name in predicted]
    if not known:
        return 0
    peak_bytes = max(predicted[name] + more[name] for name in known)
    return max(0, peak_bytes - max(predicted[name] for name in known))
