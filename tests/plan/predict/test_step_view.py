"""Steps over time: what is drawn adds up to what was predicted, or to what a timeline noted."""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Sequence

import pytest
import torch

from hf_pyao import attach
from hf_pyao.engine.runtime.timeline import StepTimeline
from hf_pyao.plan.documents.schema import to_plain
from hf_pyao.plan.documents.step import MemoryPoint, StepReport, StepSpan
from hf_pyao.plan.hardware.presets import Hardware
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.predict.step_view import measured_step, predicted_step, thinned
from hf_pyao.plan.step.prediction import Prediction
from hf_pyao.plan.step.step_program import Buffer, Operation, Segment, SlotUse, StepProgram
from tests.helpers import EVERY_LAYER, tiny_batch, tiny_model
from tests.helpers.documents import PROVENANCE
from tests.plan.predict.test_predict import FAST, SLOW, Case

COMPUTE_LANES = ("forward", "backward", "outside")
"""One of them runs at a time."""


def step_of(program: StepProgram, prediction: Prediction) -> StepReport:
    step = predicted_step(program, prediction, title="t", device="d", provenance=PROVENANCE)
    assert StepReport.from_dict(json.loads(json.dumps(to_plain(step)))) == step
    return step


def in_lanes(step: StepReport, *lanes: str) -> list[StepSpan]:
    found = [span for span in step.spans if span.lane in lanes]
    return sorted(found, key=lambda span: span.start_ms)


def overlap_ms(spans: Sequence[StepSpan]) -> float:
    pairs = itertools.pairwise(spans)
    return max((before.end_ms - after.start_ms for before, after in pairs), default=0.0)


def sum_ms(spans: Sequence[StepSpan]) -> float:
    return sum(span.end_ms - span.start_ms for span in spans)


@pytest.mark.parametrize("hardware", [SLOW, FAST], ids=lambda hardware: hardware.name)
@pytest.mark.parametrize(
    "case",
    [
        Case("opt", window=2**18),
        Case("llama", window="layer"),
        Case("gpt2", window=2**12, checkpointing=True),
    ],
    ids=lambda case: case.architecture,
)
def test_what_is_shown_adds_up(case: Case, hardware: Hardware) -> None:
    program, prediction = case.program, case.predicted(hardware)
    step = step_of(program, prediction)
    assert max(point.nbytes for point in step.memory) == prediction.peak_bytes
    assert step.peak is not None
    at_peak = [point.nbytes for point in step.memory if point.time_ms <= step.peak.time_ms][-1]
    assert at_peak == step.peak.nbytes == prediction.peak_bytes
    compute = in_lanes(step, *COMPUTE_LANES)
    stalls = in_lanes(step, "stall")
    assert sum_ms(compute) == pytest.approx(prediction.compute_ms)
    stall_ms = prediction.stall_forward_ms + prediction.stall_backward_ms
    assert sum_ms(stalls) == pytest.approx(stall_ms)
    assert stall_ms > 0 or hardware is SLOW, "a case in which nothing waits shows too little"
    both = in_lanes(step, *COMPUTE_LANES, "stall")
    assert overlap_ms(both) <= 1e-9
    assert both[0].start_ms == 0
    assert both[-1].end_ms == pytest.approx(prediction.step_ms)
    copied = in_lanes(step, "offload", "reload")
    for lane in ("offload", "reload"):
        assert overlap_ms(in_lanes(step, lane)) <= 1e-9
    if hardware.link.copy_engines == 1:
        assert overlap_ms(copied) <= 1e-9
    slots = {f"{program.layer_names[s.layer]} {s.name}": s.link_bytes for s in program.slots}
    offloaded = in_lanes(step, "offload")
    assert sum(slots[span.label] for span in offloaded) == prediction.offloaded_bytes
    left = {span.label: span.end_ms for span in offloaded}
    for span in in_lanes(step, "reload"):
        assert span.start_ms >= left[span.label], "nothing comes back before it has left"
    for phase in ("forward", "backward"):
        labels = {span.label for span in compute if span.lane == phase}
        assert labels == set(program.layer_names)


def test_a_step_ends_behind_copies_that_no_one_asked_for() -> None:
    """Their device copies are let go when backward ends, behind the copies that read them."""
    slot = SlotUse(
        name="a:0",
        layer=0,
        nbytes=2**20,
        link_bytes=2**20,
        stays=None,
        source=0,
        packed_at=1,
        left_at=1,
        reloaded=-1,
        unpacked_at=-1,
    )
    program = StepProgram(
        operations=[Operation("mm", "a", 1e6, 2**20, True)] * 2,
        buffers=[Buffer(nbytes=2**20, birth=0, death=1)],
        slots=[slot],
        segments=[Segment("forward", 0, 0, 1), Segment("backward", 0, 1, 2)],
        resident_bytes=0,
        layer_names=("layers.0",),
    )
    prediction = predict(
        program, [True], window_bytes=2**30, device=SLOW.device, link=SLOW.with_link(0.001).link
    )
    (copy,) = prediction.copies
    assert (copy.direction, copy.slot) == ("offload", 0)
    assert copy.start_ms == prediction.start_ms[1]
    compute_end_ms = prediction.start_ms[1] + prediction.compute_ms / 2
    assert compute_end_ms < prediction.step_ms == copy.end_ms < math.inf
    (stall,) = prediction.stalls
    assert (stall.slot, stall.end_ms) == (0, copy.end_ms)
    assert step_of(program, prediction).end_ms == copy.end_ms


def test_without_speeds_there_are_no_times_to_show() -> None:
    case = Case("opt")
    late = case.predicted(None)
    assert (late.start_ms, late.copies, late.stalls) == ((), (), ())
    with pytest.raises(ValueError, match="predict with a device and a link"):
        predicted_step(case.program, late, title="t", device="d", provenance=PROVENANCE)
    no_link = predict(
        case.program, [False] * len(case.program.slots), window_bytes=None, device=SLOW.device
    )
    assert no_link.start_ms
    assert not no_link.copies
    assert sum_ms(in_lanes(step_of(case.program, no_link), *COMPUTE_LANES)) == pytest.approx(
        no_link.step_ms
    )


def test_thinning_keeps_every_peak_that_a_screen_shows() -> None:
    sizes = [(n * 7919) % 1009 for n in range(50_000)]
    sizes[33_333] = 5000
    points = [MemoryPoint(time_ms=n / 10, nbytes=size) for n, size in enumerate(sizes)]
    kept = thinned(points, 1999)
    assert len(kept) <= 1999
    assert kept == sorted(kept, key=lambda point: point.time_ms)
    assert set(map(id, kept)) <= set(map(id, points))
    assert max(kept, key=lambda point: point.nbytes) is points[33_333]
    times_ms = [point.time_ms for point in kept]
    stretch_ms = points[-1].time_ms / (1999 // 2)
    for point in points[::7]:
        near = kept[
            bisect.bisect_left(times_ms, point.time_ms - stretch_ms) : bisect.bisect_right(
                times_ms, point.time_ms + stretch_ms
            )
        ]
        assert max(other.nbytes for other in near) >= point.nbytes
        assert min(other.nbytes for other in near) <= point.nbytes
    assert thinned(points[:5], 1999) == points[:5]
    still = [MemoryPoint(time_ms=0.0, nbytes=n) for n in range(100)]  # all at one moment
    assert max(point.nbytes for point in thinned(still, 10)) == 99


def test_a_real_step_is_shown_by_layers() -> None:
    model = tiny_model("llama")
    with attach(model, EVERY_LAYER) as offloader:
        timeline = StepTimeline(offloader.transport, offloader.device)
        offloader.engine.observe(timeline)
        torch.manual_seed(0)
        model(**tiny_batch(), use_cache=False).loss.backward()
        offloader.engine.observe(None)
        metrics = offloader.metrics()
        layers = list(offloader.layer_names)
        step = measured_step(
            timeline.spans(), title="t", device="cpu", provenance=PROVENANCE, metrics=metrics
        )
    assert StepReport.from_dict(json.loads(json.dumps(to_plain(step)))) == step
    assert step.is_measured
    assert step.memory == []
    assert min(span.start_ms for span in step.spans) == 0
    assert [span.label for span in in_lanes(step, "forward")] == layers
    assert [span.label for span in in_lanes(step, "backward")] == layers[::-1]
    for lane in ("forward", "backward"):
        assert overlap_ms(in_lanes(step, lane)) <= 0
    assert in_lanes(step, "offload")
    assert in_lanes(step, "reload")
    assert step.totals.step_ms == in_lanes(step, "backward")[-1].end_ms
    assert step.totals.offloaded_bytes == metrics["offloaded_bytes"] > 0
