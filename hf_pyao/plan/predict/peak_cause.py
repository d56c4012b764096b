"""Names what sets the peak: the tensor without which it would be lowest, and how far down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from hf_pyao.plan.documents.step import OUTSIDE as NO_LAYER
from hf_pyao.plan.documents.step import place_of
from hf_pyao.plan.hardware.kernel_workspaces import parts_of
from hf_pyao.plan.step.prediction import Prediction
from hf_pyao.plan.step.step_program import OUTSIDE, StepProgram


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
    form: str = ""
    """Dtype and shape of the tensor, such as ``bfloat16[8, 512]``; empty if not known."""

    @property
    def place(self) -> str:
        """Part of the step and layer, in words."""
        return place_of(self.phase, self.where)

    def __str__(self) -> str:
        """Say it in one line."""
        return (
            f"{self.tensor}, {self.nbytes / 1e9:.2f} GB, in {self.place}; without "
            f"it the peak would be {self.next_peak_bytes / 1e9:.2f} GB"
        )


class Workspace(NamedTuple):
    """What the kernel that allocates most inside takes."""

    name: str
    """Of its operation; empty if none allocates anything."""
    parts: dict[str, int]
    """Bytes, by the name that the kernel's source gives them."""


def largest_workspace(program: StepProgram) -> Workspace:
    """Return the operation of *program* whose kernel allocates most inside."""
    largest = max(program.operations, key=lambda each: each.workspace_bytes, default=None)
    if largest is None or largest.call is None:
        return Workspace("", {})
    return Workspace(largest.name.strip("_"), parts_of(largest.call, program.kernels))


_WORKSPACE = -1
"""Stands for a buffer's number where a kernel's workspace is meant."""


def _workspaces_like(program: StepProgram, at: int) -> numpy.ndarray[Any, Any]:
    """Return what operations with the kernel of operation *at* allocate inside, 0 for others."""
    name = program.operations[at].name
    return numpy.array(
        [each.workspace_bytes if each.name == name else 0 for each in program.operations],
        dtype=numpy.int64,
    )


def _name_of(program: StepProgram, buffer: int, at: int) -> str:
    if buffer == _WORKSPACE:
        return f"what {program.operations[at].name} allocates inside"
    return program.name_of(buffer)


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
    inside = _workspaces_like(program, at)
    if inside[at] and (best is None or prediction.peak_bytes - inside[at] <= best[0]):
        without_bytes = int((live - inside).max())
        if best is None or without_bytes < best[0]:
            best = (without_bytes, -int(inside[at]), _WORKSPACE)
    segment = program.segment_of(at)
    where = NO_LAYER if segment.layer == OUTSIDE else program.layer_names[segment.layer]
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
        tensor=_name_of(program, best[2], at),
        nbytes=-best[1],
        next_peak_bytes=best[0],
        form=program.forms.get(best[2], ""),
    )
