"""``View``: what a document shows, whatever it is written as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_pyao.plan.documents.provenance import Provenance


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
