"""What is on the device in each segment of a step: measured, and predicted.

Times of a plan's step are measured and corrected; so is its memory. What no prediction knows (what
FSDP2 and ZeRO gather, compiled code, buffers of a user's hooks) is in the measured bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from hf_pyao.plan.step.prediction import Prediction
from hf_pyao.plan.step.step_program import BACKWARD, FORWARD, OUTSIDE, StepProgram

HEAD = "head"
"""From the end of the last layer's forward to the first backward of a layer."""


def allocated_and_peak_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes of *device*'s tensors, now and at most so far; None: they are not counted.

    Nothing waits for the device: its memory is allocated as the host goes.
    """
    if device.type in ("cpu", "mps", "meta"):
        return None
    count = torch.accelerator.memory_allocated, torch.accelerator.max_memory_allocated
    return count[0](device), count[1](device)


class SegmentMemory:
    """Most bytes that tensors take in forward, head and backward of one micro-batch.

    They are read where a layer's call begins and ends: what is allocated then, and the peak, which
    is this segment's if it has grown since the last look. Nobody's statistics are reset. So peaks
    below those of earlier micro-batches are not seen, and what is found is never too much.

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
        self._is_over = False
        self.grown_bytes: dict[str, int] = {}
        """By segment, above what was there when the first layer began, but for gradients."""

    def at_border(self, phase: str, *, is_start: bool) -> None:
        """Look, where a layer's forward or backward begins or ends."""
        found = None if self._is_over else allocated_and_peak_bytes(self._device)
        if found is None:
            return
        allocated_bytes, peak_bytes = found
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
        """Look no more: the micro-batch is over."""
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


def unpredicted_bytes(measured: Mapping[str, float], predicted: Mapping[str, int]) -> int:
    """Return by how much a step takes more than is predicted, in the segment where that is most."""
    more = [measured[name] - predicted[name] for name in measured.keys() & predicted.keys()]
    return int(max([0.0, *more]))
