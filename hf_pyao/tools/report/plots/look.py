"""How plots look, and what all of them are made with.

Colours and markers tell families of methods apart, so that a plot reads in grey too.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_pyao.plan.documents.bench import REFERENCE
from hf_pyao.plan.documents.schema import ReportError
from hf_pyao.text import describe_error, one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PNG_DPI = 160
_DOLLAR = r"\$"
"""A dollar sign that begins no formula."""
MOST_ROWS = 100
"""Most rows that a plot shows: an image has a largest size."""

INK, SOFT, LINE, BACK = "#1f2933", "#616e7c", "#e4e7eb", "#ffffff"
"""Colours of text, of text beside, of the grid, and of what is behind."""


@dataclass(frozen=True)
class Family:
    """Methods that work alike, and how a plot shows them."""

    label: str
    marker: str
    colour: str


NOTHING = Family("nothing", "*", "#1f2933")
OURS = Family("hf_pyao", "o", "#0b7a75")
RECOMPUTE = Family("recompute", "^", "#d9822b")
OFFLOAD = Family("other offloading", "s", "#5b62b3")
FORWARD = Family("forward", "s", "#3b6fb6")
BACKWARD = Family("backward", "s", "#7b5ea7")
WAITING = Family("waiting for copies", "s", "#c0392b")
RELOAD = Family("reload", "s", "#5f8f24")
QUIET = Family("", ".", "#7b8794")
"""What belongs to none."""
FAMILIES = (NOTHING, OURS, RECOMPUTE, OFFLOAD)


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


def two_axes(
    width: float, heights: Sequence[float], ratios: Sequence[float] = (3, 2)
) -> tuple[Figure, tuple[Axes, Axes], Axes | None]:
    """Return a figure with two axes beside each other, and one below if there is a height."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, sum(heights)), layout="constrained", facecolor=BACK)
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights, width_ratios=ratios)
    both = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    below = figure.add_subplot(grid[1, :]) if len(heights) > 1 else None
    for axes in (*both, *(() if below is None else (below,))):
        style(axes)
    return figure, both, below


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


def bars(axes: Axes, rows: Sequence[tuple[str, float, str]], texts: Sequence[str]) -> None:
    """Draw bars from the top: label, value and colour of each, and the text at its end."""
    rows = rows[::-1]  # barh draws from the bottom
    values = [float(row[1]) for row in rows]
    labels = [plain(row[0]) for row in rows]
    drawn = axes.barh(range(len(rows)), values, color=[row[2] for row in rows], height=0.66)
    axes.set_yticks(range(len(rows)), labels)
    behind = {"facecolor": BACK, "edgecolor": "none", "pad": 0.8}
    shown = list(texts)[::-1]
    axes.bar_label(drawn, shown, padding=4, color=INK, fontsize=9, bbox=behind)
    axes.set_xlim(0, max(1e-9, *values) * 1.25)
    axes.grid(visible=False, axis="y")


def family_of(method: str) -> Family:
    """Return the family of a method, by its name."""
    if method == REFERENCE:
        return NOTHING
    if method.startswith(("pyao", "policy")):
        return OURS
    return RECOMPUTE if method.startswith(("checkpoint", "deepspeed")) else OFFLOAD


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
