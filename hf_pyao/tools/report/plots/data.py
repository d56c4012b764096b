"""What plots show, as data: five kinds, which ``draw.py`` draws. Imports no matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class Family(NamedTuple):
    """Things that are alike, and how a plot shows them."""

    label: str
    colour: str


NOTHING = Family("nothing", "#1f2933")
OURS = Family("hf_pyao", "#0b7a75")
RECOMPUTE = Family("recompute", "#d9822b")
OFFLOAD = Family("other offloading", "#5b62b3")
FORWARD = Family("forward", "#3b6fb6")
BACKWARD = Family("backward", "#7b5ea7")
WAITING = Family("waiting for copies", "#c0392b")
RELOAD = Family("reload", "#5f8f24")
QUIET = Family("outside of layers", "#7b8794")
"""What belongs to none."""

MOST_POINTS = 200
"""Most rows and points that a plot shows: an image has a largest size."""


class Bar(NamedTuple):
    """A bar; *text* is written at its end."""

    label: str
    value: float
    family: Family
    text: str


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Horizontal bars, the first at the top."""

    title: str = ""
    bars: Sequence[Bar]
    x_label: str


class Line(NamedTuple):
    """Points of one name, joined in their order."""

    name: str
    family: Family
    x: Sequence[float]
    y: Sequence[float]
    x_errors: tuple[Sequence[float], Sequence[float]] | None = None
    """How far each point may be off to the left, and to the right."""
    y_errors: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True, kw_only=True)
class Front:
    """One figure over another: what is gained over what it costs."""

    title: str = ""
    lines: Sequence[Line]
    x_label: str
    y_label: str
    names: Sequence[tuple[float, float, str]] = ()
    """Points that have a text beside them."""
    marked: tuple[float, float, str] | None = None
    """A point that has a ring around it, and what the ring says."""
    x_limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class Columns:
    """A stacked bar for each of several things in a row."""

    title: str = ""
    parts: Sequence[tuple[str, Family, Sequence[float]]]
    """From below: name, family, and a figure for each thing."""
    x_label: str
    y_label: str


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A size over time, in steps."""

    title: str = ""
    times_ms: Sequence[float]
    sizes: Sequence[float]
    y_label: str
    end_ms: float
    limit: tuple[float, str] | None = None
    """A size, and what it is."""
    peak: tuple[float, float, str] | None = None
    """Time, size, and what is said there."""


class Lane(NamedTuple):
    """Spans of one kind: label, start and end of each, in order of their starts."""

    family: Family
    spans: Sequence[tuple[str, float, float]]


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """What runs when: a row of lanes for each resource, from the top."""

    title: str = ""
    rows: Sequence[tuple[str, Sequence[Lane]]]
    end_ms: float


Plot: TypeAlias = Bars | Front | Columns | Timeline | Lanes
