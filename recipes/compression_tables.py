"""Tables and plot of the error study."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tables(document: dict[str, Any]) -> str:
    return f"{len(document['runs'])} runs"


def draw(document: dict[str, Any], path: Path) -> None:
    pass
