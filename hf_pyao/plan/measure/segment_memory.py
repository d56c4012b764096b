"""What is on the device in each segment of a step: measured, and predicted.

Times of a plan's step are measured and corrected; so is its memory. What no prediction knows (what
FSDP2 and ZeRO gather, compiled code, buffers of a user's hooks) is in the measured bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from hf_pyao.metrics import format_bytes
from hf_pyao.plan.step.prediction import Prediction
from hf_pyao.plan.step.step_program import BACKWARD, FORWARD, OUTSIDE, StepProgram

HEAD = "head"
"""From the end of the last layer's forward to the first backward of a layer."""

OPTIMIZER = "optimizer"
"""From the end of the layers' backward to the next forward of a layer. No plan of saved tensors
changes what it takes."""


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
        self._base_bytes: int | None = None
        self._peak_bytes = 0
        self._segment = FORWARD
        self._is_over = self._is_done = False
        self.grown_bytes: dict[str, int] = {}
        """By segment, above what was there when the first layer began, but for gradients."""

    def at_border(self, phase: str, *, is_start: bool) -> None:
        """Look, where a layer's forward or backward begins or ends."""
        found = None if self._is_done else allocated_and_peak_bytes(self._device)
        if found is None:
            return
        allocated_bytes, peak_bytes = found
        if self._is_over:
            self._is_done = True
            if self._base_bytes is not None and peak_bytes > self._peak_bytes:
                self.grown_bytes[OPTIMIZER] = peak_bytes - self._base_bytes
            return
        if self._base_bytes is None:
            self._base_bytes = allocated_bytes - self._gradient_bytes()
            self._peak_bytes = peak_bytes
        most_bytes = peak_bytes if peak_bytes > self._peak_bytes else allocated_bytes
        self._peak_bytes = peak_bytes
        before = FORWARD if is_start and phase == FORWARD else self._segment
        grown_bytes = most_bytes - self._base_bytes
        self.grown_bytes[before] = max(self.grown_bytes.get(before, 0), grown_bytes)
        if is_start:
            self._segment = phase
        elif phase == FORWARD:
            self._segment = HEAD

    def end(self) -> None:
        """Look once more, where the next one begins: the micro-batch is over."""
        self._is_over = True


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
    first, last = in_layers[0], in_layers[-1]
    start = segments[first].start
    base_bytes = live_bytes[start - 1] if start else program.resident_bytes
    found: dict[str, int] = {}
    name = FORWARD
    for number in range(first, last + 1):
        segment = segments[number]
        if segment.layer != OUTSIDE:
            name = segment.phase
        elif name == FORWARD:
            behind = next(each for each in in_layers if each > number)
            name = HEAD if segments[behind].phase == BACKWARD else FORWARD
        grown_bytes = max(live_bytes[segment.start : segment.end]) - base_bytes
        found[name] = max(found.get(name, 0), grown_bytes)
    return found


class MeasuredGrowth(NamedTuple):
    """By how much memory grows over a step, by segment: measured, and predicted."""

    measured: Mapping[str, int] = {}
    predicted: Mapping[str, int] = {}

    @property
    def unpredicted_bytes(self) -> int:
        """By how much it takes more than is predicted, in the segment where that is most."""
        both = self.measured.keys() & self.predicted.keys()
        return max([0, *(self.measured[name] - self.predicted[name] for name in both)])

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
