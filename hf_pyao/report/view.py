"""``View``: what a document shows, whatever it is written as; ``Kind``: what belongs to a kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_pyao.documents.provenance import Provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_pyao.report.plots.look import Look


class Table(NamedTuple):
    """A table: its first column is text, the others are figures."""

    header: list[str]
    rows: list[list[str]]
    num_text_columns: int = 1


@dataclass(frozen=True, kw_only=True)
class View:
    """What a document shows, in this order. All texts are plain: pages escape them."""

    title: str
    summary: str = ""
    """A paragraph before the plot."""
    tables: Sequence[Table] = ()
    conclusion: str = ""
    """A paragraph after the tables."""
    notes: Sequence[str] = ()
    """A list of remarks."""
    legend: str = ""
    """A paragraph in small print."""
    provenance: Provenance | None = None
    """Where the figures come from; None if it was not noted."""
    measured_on: Sequence[str] = ()
    """What stands before the command in the line of provenance."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of document: how it is read and shown. A new kind is one more in ``documents.KINDS``.

    A document is a dataclass with ``schema_version`` and ``kind``.
    """

    document: type[Any]
    """Its class, which has ``from_dict(values, where)``."""
    view: Callable[[Any], View]
    figure: Callable[[Any, Look], Figure | None] | None = None
    """Draws its plot, or returns None where there is too little to draw; None: it has none."""
    trace_events: Callable[[Any, int], list[dict[str, Any]]] | None = None
    """Returns its spans as events of a Chrome trace, as the process of a number; None: it has no
    spans."""
