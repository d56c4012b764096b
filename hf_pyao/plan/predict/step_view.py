"""One step over time, as a document: of what was predicted, or of what a timeline noted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_pyao.engine.runtime.timeline import Span
from hf_pyao.errors import ConfigError
from hf_pyao.plan.documents.provenance import Provenance
from hf_pyao.plan.documents.step import MemoryPoint, StepPeak, StepReport, StepSpan, StepTotals
from hf_pyao.plan.predict.peak_cause import peak_cause
from hf_pyao.plan.step.prediction import PredictedCopy, Prediction, Stall
from hf_pyao.plan.step.step_program import OUTSIDE, Segment, StepProgram

MOST_POINTS = 2000
"""Most points of a curve of memory."""

Interval = tuple[float, float]


def predicted_step(
    program: StepProgram,
    prediction: Prediction,
    *,
    title: str,
    device: str,
    provenance: Provenance,
    limit_bytes: int | None = None,
    late_peak_bytes: int | None = None,
    setup: Mapping[str, Any] | None = None,
) -> StepReport:
    """Return a predicted step as a document.

    Args:
        program: the step.
        prediction: what it comes to, on a device and a link.
        title: heading.
        device: name of the device.
        provenance: where the figures come from.
        limit_bytes: what the device can hold.
        late_peak_bytes: the peak without a link, which bounds that of every link.
        setup: model, sizes, and the way that it is trained.

    Raises:
        ConfigError: the prediction has no times.
    """
    if len(prediction.start_ms) != program.num_operations or math.isnan(prediction.step_ms):
        raise ConfigError(
            "the prediction has no times: predict with a device and a link", key="wrong-argument"
        )
    cause = peak_cause(program, prediction)
    return StepReport(
        title=title,
        is_measured=False,
        setup=dict(setup or {}),
        device=device,
        memory=_memory(prediction),
        limit_bytes=limit_bytes,
        peak=StepPeak(
            time_ms=prediction.start_ms[prediction.peak_at] if prediction.start_ms else 0.0,
            nbytes=prediction.peak_bytes,
            phase=cause.phase,
            where=cause.where,
            tensor=cause.tensor,
            tensor_bytes=cause.nbytes,
            next_peak_bytes=cause.next_peak_bytes,
        ),
        spans=[*_compute_spans(program, prediction), *_copy_spans(program, prediction)],
        totals=StepTotals(
            step_ms=prediction.step_ms,
            compute_ms=prediction.compute_ms,
            stall_forward_ms=prediction.stall_forward_ms,
            stall_backward_ms=prediction.stall_backward_ms,
            offloaded_bytes=prediction.offloaded_bytes,
            read_in_place_bytes=prediction.read_in_place_bytes,
            host_peak_bytes=prediction.host_peak_bytes,
            late_peak_bytes=late_peak_bytes,
        ),
        provenance=provenance,
    )


def measured_step(
    spans: Sequence[Span],
    *,
    title: str,
    device: str,
    provenance: Provenance,
    metrics: Mapping[str, float] | None = None,
    setup: Mapping[str, Any] | None = None,
) -> StepReport:
    """Return what a :class:`~hf_pyao.engine.runtime.timeline.StepTimeline` noted as a document.

    Layers are shown whole. Memory is not: a timeline does not note it.

    Args:
        spans: the timeline's, of one step.
        title: heading.
        device: name of the device.
        provenance: where the figures come from.
        metrics: ``offloader.metrics()`` after the step; empty: sums are not known.
        setup: model, sizes, and the way that it is trained.
    """
    begin_ms = min((span.start_ms for span in spans), default=0.0)
    found = []
    for span in spans:
        is_part = span.lane in ("forward", "backward") and " " in span.label
        if is_part or span.end_ms < span.start_ms:
            continue
        is_known = span.lane in ("forward", "backward", "offload", "reload")
        found.append(
            StepSpan(
                lane=span.lane if is_known else "overhead",
                label=span.label if is_known else f"{span.lane} {span.label}",
                start_ms=span.start_ms - begin_ms,
                end_ms=span.end_ms - begin_ms,
            )
        )
    figures = metrics or {}
    counted = {
        name: int(figures[name])
        for name in ("offloaded_bytes", "host_peak_bytes")
        if name in figures
    }
    return StepReport(
        title=title,
        is_measured=True,
        setup=dict(setup or {}),
        device=device,
        spans=found,
        totals=StepTotals(
            step_ms=max((span.end_ms for span in found if span.lane == "backward"), default=0.0),
            stall_forward_ms=figures.get("stall_forward_ms"),
            stall_backward_ms=figures.get("stall_backward_ms"),
            **counted,
        ),
        provenance=provenance,
    )


# ---- memory ------------------------------------------------------------------------------------


def _memory(prediction: Prediction) -> list[MemoryPoint]:
    """Return the bytes on the device from the start of each operation to that of the next."""
    points = [
        MemoryPoint(time_ms=time_ms, nbytes=nbytes)
        for time_ms, nbytes in zip(prediction.start_ms, prediction.live_bytes, strict=True)
    ]
    if not points:
        return []
    points = thinned(points, MOST_POINTS - 1)
    return [*points, MemoryPoint(time_ms=prediction.step_ms, nbytes=points[-1].nbytes)]


def thinned(points: Sequence[MemoryPoint], most: int) -> list[MemoryPoint]:
    """Return *most* points or fewer: of each stretch of time, its highest and its lowest.

    The highest of a stretch keeps its own time and size, so that no peak is lost.
    """
    if len(points) <= most:
        return list(points)
    num_stretches = max(1, most // 2)
    first_ms = points[0].time_ms
    stretch_ms = (points[-1].time_ms - first_ms) / num_stretches or 1.0
    stretches: dict[int, list[MemoryPoint]] = {}
    for point in points:
        number = min(num_stretches - 1, int((point.time_ms - first_ms) / stretch_ms))
        stretches.setdefault(number, []).append(point)
    kept = []
    for stretch in stretches.values():
        ends = {
            choose(range(len(stretch)), key=lambda index: stretch[index].nbytes)
            for choose in (min, max)
        }
        kept += [stretch[index] for index in sorted(ends)]
    return kept


# ---- time --------------------------------------------------------------------------------------


def _compute_spans(program: StepProgram, prediction: Prediction) -> Iterator[StepSpan]:
    """Yield the compute of each part of the step; where it waits, it is in pieces."""
    stalls = [(stall.start_ms, stall.end_ms) for stall in prediction.stalls]
    for segment, (start_ms, end_ms) in zip(
        program.segments, _intervals(program, prediction), strict=True
    ):
        lane, label = _lane_of(program, segment)
        for piece_start_ms, piece_end_ms in _without(start_ms, end_ms, stalls):
            yield StepSpan(lane=lane, label=label, start_ms=piece_start_ms, end_ms=piece_end_ms)


def _intervals(program: StepProgram, prediction: Prediction) -> list[Interval]:
    """Return from when to when each segment runs, waiting included."""
    end = program.num_operations
    moments = [*prediction.start_ms, prediction.step_ms]
    return [(moments[s.start], moments[min(s.end, end)]) for s in program.segments]


def _lane_of(program: StepProgram, segment: Segment) -> tuple[str, str]:
    if segment.layer == OUTSIDE:
        return "outside", f"outside of layers, {segment.phase}"
    return segment.phase, program.layer_names[segment.layer]


def _without(start_ms: float, end_ms: float, holes: Sequence[Interval]) -> Iterator[Interval]:
    """Yield what is left of a stretch of time; *holes* are in order and do not overlap."""
    for hole_start_ms, hole_end_ms in holes:
        if hole_end_ms <= start_ms or hole_start_ms >= end_ms:
            continue
        if hole_start_ms > start_ms:
            yield start_ms, hole_start_ms
        start_ms = hole_end_ms
    if end_ms > start_ms:
        yield start_ms, end_ms


def _copy_spans(program: StepProgram, prediction: Prediction) -> Iterator[StepSpan]:
    for copy in prediction.copies:
        label = _copy_name(program, copy)
        yield StepSpan(lane=copy.direction, label=label, start_ms=copy.start_ms, end_ms=copy.end_ms)
    for stall in prediction.stalls:
        label = _copy_name(program, stall)
        yield StepSpan(lane="stall", label=label, start_ms=stall.start_ms, end_ms=stall.end_ms)


def _copy_name(program: StepProgram, copy: PredictedCopy | Stall) -> str:
    if copy.layer >= 0:
        return f"{program.layer_names[copy.layer]} weights"
    slot = program.slots[copy.slot]
    return f"{program.layer_names[slot.layer]} {slot.name}"
