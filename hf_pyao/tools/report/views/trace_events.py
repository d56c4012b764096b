"""Documents with spans as events of a Chrome trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_pyao.plan.documents.profile import Profile, ProfiledSpan
from hf_pyao.plan.documents.step import LANES, StepReport, StepSpan
from hf_pyao.text import one_line


def step_events(report: StepReport, process: int) -> list[dict[str, Any]]:
    """Return threads, spans and memory of *report*, as the process of a number."""
    memory = [
        {
            "ph": "C",
            "pid": process,
            "name": "memory on the device",
            "ts": point.time_ms * 1e3,
            "args": {"bytes": point.nbytes},
        }
        for point in report.memory
    ]
    return [*_span_events(report.spans, process), *memory]


def profile_events(profile: Profile, process: int) -> list[dict[str, Any]]:
    """Return threads and spans of *profile*'s last micro-batch; nothing if it holds none."""
    return _span_events(profile.timeline, process)


def _span_events(spans: Sequence[StepSpan | ProfiledSpan], process: int) -> list[dict[str, Any]]:
    """Return a thread for each lane, and complete events by start; none starts before 0.

    Spans that end before they start, as clocks of two streams may have it, are left out.
    """
    spans = [span for span in spans if span.end_ms >= span.start_ms]
    used = {span.lane for span in spans}
    lanes = [*(lane for lane in LANES if lane in used), *sorted(used.difference(LANES))]
    threads = {lane: number for number, lane in enumerate(lanes, start=1)}
    begin_ms = min((span.start_ms for span in spans if span.start_ms < 0), default=0.0)
    events: list[dict[str, Any]] = []
    for lane, thread in threads.items():
        place = {"ph": "M", "pid": process, "tid": thread}
        events.append({**place, "name": "thread_name", "args": {"name": one_line(lane)}})
        events.append({**place, "name": "thread_sort_index", "args": {"sort_index": thread}})
    events += [
        {
            "ph": "X",
            "pid": process,
            "tid": threads[span.lane],
            "name": one_line(span.label),
            "cat": one_line(span.lane),
            "ts": (span.start_ms - begin_ms) * 1e3,
            "dur": (span.end_ms - span.start_ms) * 1e3,
        }
        for span in sorted(spans, key=lambda span: (span.start_ms, -span.end_ms))
    ]
    return events
