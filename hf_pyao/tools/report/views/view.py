"""``View``: what a document shows, whatever it is written as."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from hf_pyao.plan.documents.provenance import Provenance
from hf_pyao.plan.hardware.presets import OTHERS_TIMES
from hf_pyao.quantities import ABSENT
from hf_pyao.tools.report.plots.data import Plot

R = TypeVar("R")


class Table(NamedTuple):
    """A table: its first column is text, the others are figures."""

    header: list[str]
    rows: list[list[str]]
    num_text_columns: int = 1


def others_columns(
    card: str, step_ms: Callable[[R], float | None]
) -> Iterator[tuple[str, Callable[[R], str]]]:
    """Yield columns of what steps took that others measured on *card*, as far as it is known.

    Args:
        card: its name.
        step_ms: the predicted time of a row; None: it has none.
    """
    for (name, kernels), band in OTHERS_TIMES.items():
        if name == card:

            def show(row: R, band: tuple[float, float] = band) -> str:
                ms = step_ms(row)
                return ABSENT if ms is None else " to ".join(f"{ms * each:,.0f}" for each in band)

            yield f"others' {kernels} kernels, ms", show


def table_of(
    rows: Sequence[R], columns: Iterable[tuple[str, Callable[[R], str]]], *, keeps_all: bool = False
) -> Table:
    """Return a table: names of columns, and what each shows of a row.

    Columns that no row has a figure for are left out, unless *keeps_all*.
    """
    shown = [(name, [show(row) for row in rows]) for name, show in columns]
    if not keeps_all:
        shown = [each for each in shown if any(cell != ABSENT for cell in each[1])]
    cells = zip(*(column for _, column in shown), strict=True)
    return Table([name for name, _ in shown], [list(row) for row in cells])


def cell(value: float | None, spec: str, unit: float = 1) -> str:
    """Return a figure in *unit* as *spec* formats it; a dash where there is none."""
    return ABSENT if value is None else format(value / unit, spec)


@dataclass(frozen=True, kw_only=True)
class View:
    """What a document shows, in this order. All texts are plain: pages escape them."""

    title: str
    summary: str = ""
    """A paragraph before the plots."""
    plots: Sequence[Sequence[Plot]] = ()
    """Rows of plots beside each other."""
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
