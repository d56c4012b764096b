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
from hf_pyao.plan.documents.schema import ReportError
from hf_pyao.text import echo, one_line
from hf_pyao.tools.report.kinds import KINDS, Document, kind_of, view_of


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
    events = []
    for number, document in enumerate(documents, start=1):
        make_events = kind_of(document).trace_events
        found = make_events(document, number) if make_events is not None else []
        if not found:
            able = ", ".join(name for name, kind in KINDS.items() if kind.trace_events)
            raise ReportError(
                f"a trace (.json) shows what ran when, which this document of kind "
                f"{document.kind!r} does not hold; kinds that may: {able}. `pyao estimate ... "
                "--step FILE.json` writes one. Give an output that ends in .md or .html for this.",
                key="file-kind",
            )
        title = one_line(view_of(document).title)
        events.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": title}})
        events += found
    return {"traceEvents": events, "displayTimeUnit": "ms"}
