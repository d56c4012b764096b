"""Documents with spans as a Chrome trace, for chrome://tracing and Perfetto.

The format is the JSON object of the "Trace Event Format": complete events (``X``) for spans, a
thread for each lane, and counter events (``C``) for memory. Times are in microseconds there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_pyao.files import replace_file
from hf_pyao.plan.documents.profile import Profile, ProfiledSpan
from hf_pyao.plan.documents.schema import ReportError
from hf_pyao.plan.documents.step import LANES, StepReport, StepSpan
from hf_pyao.text import echo, one_line
from hf_pyao.tools.report.kinds import Document, view_of


def write_trace(documents: Sequence[Document], output: str | Path) -> list[Path]:
    """Write the spans of *documents*, each as a process of its own; return the file written.

    Raises:
        ReportError: a document is of a kind without spans, or the file cannot be written.
    """
    text = json.dumps(trace_of(documents), allow_nan=False)
    try:
        replace_file(Path(output), text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        reason = error.strerror or error
        raise ReportError(
            f"cannot write {echo(str(output))}: {reason}.", key="file-unwritable"
        ) from error
    return [Path(output)]


def trace_of(documents: Sequence[Document]) -> dict[str, Any]:
    """Return the trace as plain values.

    Raises:
        ReportError: a document is of a kind without spans.
    """
    events: list[dict[str, Any]] = []
    for number, document in enumerate(documents, start=1):
        found = _events(document, number)
        if not found:
            raise ReportError(
                f"a trace (.json) shows what ran when, which this document of kind "
                f"{document.kind!r} does not hold; kinds that may: profile, step. `pyao estimate "
                "... --step FILE.json` writes one. Give an output that ends in .md or .html for "
                "this.",
                key="file-kind",
            )
        title = one_line(view_of(document).title)
        events.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": title}})
        events += found
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(document: Document, process: int) -> list[dict[str, Any]]:
    """Return threads, spans and memory of a step, or of a profile's last micro-batch."""
    if isinstance(document, Profile):
        return _span_events(document.timeline, process)
    if not isinstance(document, StepReport):
        return []
    memory = [
        {
            "ph": "C",
            "pid": process,
            "name": "memory on the device",
            "ts": point.time_ms * 1e3,
            "args": {"bytes": point.nbytes},
        }
        for point in document.memory
    ]
    return [*_span_events(document.spans, process), *memory]


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
