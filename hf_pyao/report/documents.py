"""Which kinds of JSON documents there are, and how each is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_pyao.errors import nearest
from hf_pyao.report.bench_report import BenchReport, FactsReport
from hf_pyao.report.estimate_report import EstimateReport
from hf_pyao.report.profile_report import Profile
from hf_pyao.report.run_report import RunReport
from hf_pyao.report.schema import ReportError, read_json
from hf_pyao.text import echo

Document = RunReport | BenchReport | FactsReport | EstimateReport | Profile

KINDS: Mapping[str, Callable[[Mapping[str, Any], str], Document]] = {
    "run": RunReport.from_dict,
    "bench": BenchReport.from_dict,
    "facts": FactsReport.from_dict,
    "estimate": EstimateReport.from_dict,
    "profile": Profile.from_dict,
}
"""Value of ``kind`` -> reader."""


def read_document(path: str | Path) -> Document:
    """Read a JSON document of any kind.

    Raises:
        ReportError: the file cannot be read, is of an unknown kind or of another version.
    """
    values = read_json(path)
    kind, where = values.get("kind"), echo(str(path))
    if not isinstance(kind, str) or kind not in KINDS:
        hint = nearest(kind, KINDS) if isinstance(kind, str) else ""
        raise ReportError(
            f"{where} has kind {echo(kind)}{hint or ';'} known: {', '.join(KINDS)}. Give files "
            "that hf_pyao wrote (`pyao bench`, or a training run with --activation_offload_report)."
        )
    return KINDS[kind](values, where)


def read_named_document(path: str | Path) -> Document:
    """Read a JSON document of any kind; a run without a name gets its file's.

    Raises:
        ReportError: as :func:`read_document`.
    """
    document = read_document(path)
    if not isinstance(document, RunReport) or document.extra.get("name"):
        return document
    return dataclasses.replace(document, extra={**document.extra, "name": Path(path).name})
