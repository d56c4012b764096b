"""Which kinds of JSON documents there are, and how each is read, shown and drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hf_pyao.errors import nearest
from hf_pyao.plan.documents.bench import BenchReport, FactsReport
from hf_pyao.plan.documents.estimate import EstimateReport
from hf_pyao.plan.documents.microbatch import MicroBatchReport
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.documents.prediction import PredictionReport
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.documents.run import RunReport
from hf_pyao.plan.documents.schema import ReportError, read_json
from hf_pyao.plan.documents.step import StepReport
from hf_pyao.plan.documents.sweep import SweepReport
from hf_pyao.text import echo
from hf_pyao.tools.report.plots.draw import drawn
from hf_pyao.tools.report.plots.look import need_matplotlib
from hf_pyao.tools.report.views.bench_view import bench_view, facts_view
from hf_pyao.tools.report.views.estimate_view import estimate_view
from hf_pyao.tools.report.views.microbatch_view import microbatch_view
from hf_pyao.tools.report.views.plan_view import plan_view
from hf_pyao.tools.report.views.prediction_view import prediction_view
from hf_pyao.tools.report.views.profile_view import profile_view
from hf_pyao.tools.report.views.run_view import run_view
from hf_pyao.tools.report.views.step_view import step_view
from hf_pyao.tools.report.views.sweep_view import sweep_view
from hf_pyao.tools.report.views.view import View

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Kind(NamedTuple):
    """A kind of document: how it is read and shown. A new kind is one more row of :data:`KINDS`.

    A document is a dataclass with ``schema_version`` and ``kind``.
    """

    document: type[Any]
    """Its class, which has ``from_dict(values, where)``."""
    view: Callable[[Any], View]


Document: TypeAlias = Any
"""An instance of the class of one of :data:`KINDS`."""

KINDS: Mapping[str, Kind] = {
    "run": Kind(RunReport, run_view),
    "bench": Kind(BenchReport, bench_view),
    "facts": Kind(FactsReport, facts_view),
    "estimate": Kind(EstimateReport, estimate_view),
    "profile": Kind(Profile, profile_view),
    "prediction": Kind(PredictionReport, prediction_view),
    "sweep": Kind(SweepReport, sweep_view),
    "plan": Kind(Plan, plan_view),
    "microbatch": Kind(MicroBatchReport, microbatch_view),
    "step": Kind(StepReport, step_view),
}
"""Value of ``kind`` -> what belongs to it. A new kind of document is one more row."""


def view_of(document: Document) -> View:
    """Return what *document* shows."""
    kinds = KINDS.values()
    return next(kind for kind in kinds if isinstance(document, kind.document)).view(document)


def figure_of(document: Document) -> Figure | None:
    """Return the plots that belong to *document*; None if there are none.

    Raises:
        ReportError: matplotlib is missing.
    """
    view = view_of(document)
    if not view.plots:
        return None
    need_matplotlib()
    return drawn(view.plots, view.title)


def read_document(path: str | Path) -> Any:
    """Read a JSON document of any kind.

    Raises:
        ReportError: the file cannot be read, is of an unknown kind or of another version.
    """
    values = read_json(path)
    kind, where = values.get("kind"), echo(str(path))
    if kind == "board":
        raise ReportError(
            f"{where} is a board of methods, which a recipe shows now: python "
            "recipes/bench/board.py --show FILE.json, in a checkout of hf_pyao.",
            key="file-kind",
        )
    if not isinstance(kind, str) or kind not in KINDS:
        hint = nearest(kind, KINDS) if isinstance(kind, str) else ""
        raise ReportError(
            f"{where} has kind {echo(kind)}{hint or ';'} known: {', '.join(KINDS)}. Give files "
            "that hf_pyao wrote (`pyao bench`, or a training run with "
            "--activation_offload_report).",
            key="file-kind",
        )
    return KINDS[kind].document.from_dict(values, where)


def read_named_document(path: str | Path) -> Any:
    """Read a JSON document of any kind; a run without a name gets its file's.

    Raises:
        ReportError: as :func:`read_document`.
    """
    document = read_document(path)
    if not isinstance(document, RunReport) or document.extra.get("name"):
        return document
    return dataclasses.replace(document, extra={**document.extra, "name": Path(path).name})
