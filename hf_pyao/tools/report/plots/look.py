"""How plots look, and what all of them are made with."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from hf_pyao.plan.documents.schema import ReportError
from hf_pyao.text import describe_error, one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PNG_DPI = 160
_DOLLAR = r"\$"
"""A dollar sign that begins no formula."""

INK, SOFT, LINE, BACK = "#1f2933", "#616e7c", "#e4e7eb", "#ffffff"
"""Colours of text, of text beside, of the grid, and of what is behind."""


def plain(text: str, longest: int = 60) -> str:
    """Return *text* as a label shows it: in one line, cut, and with no formula in it."""
    text = one_line(text)
    text = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return text.replace("$", _DOLLAR)


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure of so many inches, with its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor=BACK)
    axes = figure.add_subplot()
    style(axes)
    return figure, axes


def style(axes: Axes) -> None:
    """Give *axes* these colours."""
    axes.set_facecolor(BACK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(LINE)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.grid(visible=True, color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.label.set(color=INK, fontsize=9.5)
    axes.yaxis.label.set(color=INK, fontsize=9.5)


def need_matplotlib() -> None:
    """Check that plots can be drawn.

    Raises:
        ReportError: matplotlib is missing; says how to get it and how to do without.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise ReportError(
            "plots need matplotlib, which is not installed: pip install 'hf_pyao[report]'. With "
            "--no-plots the tables are written without them.",
            key="missing-package",
        ) from error
    except Exception as error:  # installed, but broken
        raise ReportError(
            f"plots need matplotlib, which cannot be imported ({describe_error(error)}): install "
            "it anew. With --no-plots the tables are written without them.",
            key="missing-package",
        ) from error


def image_bytes(figure: Figure, kind: str) -> bytes:
    """Return *figure* as a file of *kind*: ``png`` or ``svg``."""
    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else None  # the same report, the same bytes
    figure.savefig(buffer, format=kind, dpi=PNG_DPI, metadata=metadata)
    return buffer.getvalue()
