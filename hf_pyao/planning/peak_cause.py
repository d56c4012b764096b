"""Names what sets the peak: the tensor without which it would be lowest, and how far down."""

from __future__ import annotations

from dataclasses import dataclass

import numpy

from hf_pyao.planning.prediction import Prediction
from hf_pyao.planning.step_program import OUTSIDE, StepProgram


@dataclass(frozen=True, kw_only=True)
class PeakCause:
    """What sets a predicted peak."""

    phase: str
    """``"forward"`` or ``"backward"``."""
    where: str
    """The layer in which the peak is; ``"outside of layers"`` for embeddings, head and loss."""
    tensor: str
    """The tensor without which the peak would be lowest."""
    nbytes: int
    """Its bytes."""
    next_peak_bytes: int
    """The peak without it."""

    def __str__(self) -> str:
        """Say it in one line."""
        return (
            f"{self.tensor}, {self.nbytes / 1e9:.2f} GB, in {self.phase} of {self.where}; without "
            f"it the peak would be {self.next_peak_bytes / 1e9:.2f} GB"
        )


def peak_cause(program: StepProgram, prediction: Prediction) -> PeakCause:
    """Return what sets the peak of *prediction*."""
    at = prediction.peak_at
    live = numpy.array(prediction.live_bytes, dtype=numpy.int64)
    best: tuple[int, int, int] | None = None
    for buffer, start, end in prediction.lifetimes:
        if not start <= at < end:
            continue
        nbytes = program.buffers[buffer].nbytes
        if best is not None and prediction.peak_bytes - nbytes > best[0]:
            continue  # even at the peak itself it is less than another
        without = live.copy()
        without[start:end] -= nbytes
        # Of two that lower the peak as far, the larger one.
        best = min(best or (1 << 62, 0, 0), (int(without.max()), -nbytes, buffer))
    segment = program.segment_of(at)
    where = "outside of layers" if segment.layer == OUTSIDE else program.layer_names[segment.layer]
    if best is None:  # nothing of the step is there
        return PeakCause(
            phase=segment.phase,
            where=where,
            tensor="the weights",
            nbytes=program.resident_bytes,
            next_peak_bytes=0,
        )
    return PeakCause(
        phase=segment.phase,
        where=where,
        tensor=program.name_of(best[2]),
        nbytes=-best[1],
        next_peak_bytes=best[0],
    )
