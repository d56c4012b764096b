"""Figures as tables show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GIB = 2**30
MIB = 2**20
ABSENT = "–"


def number(value: float) -> str:
    """Return *value* with three significant digits or whole, whichever is more."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def quantity(key: str, value: float) -> str:
    """Return a metric's value with the unit that its key names."""
    if key.endswith("_ms"):
        return f"{number(value)} ms"
    if value >= GIB:
        return f"{value / GIB:,.2f} GiB"
    return f"{value / MIB:,.2f} MiB"


def fact_text(value: Any) -> str:
    """Return a fact as a table shows it."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ABSENT}[value]
    if isinstance(value, float):
        return number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {fact_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(fact_text, value))
    return str(value)
