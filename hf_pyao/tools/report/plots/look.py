"""How plots look: on light and dark pages, wide and narrow; and what all of them are made with.

Colours and markers tell families of methods apart, so that a plot reads in grey too.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hf_pyao.plan.documents.bench import REFERENCE
from hf_pyao.plan.documents.schema import ReportError
from hf_pyao.text import describe_error, one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PNG_DPI = 160
_WORD = re.compile(r"[^\s,:/+-]*(?:[,:/+-]+|\s+)|[^\s,:/+-]+")
"""A word with the space, or the signs between words of a name, that a line may end behind."""
_DOLLAR = r"\$"
"""A dollar sign that begins no formula."""
MOST_ROWS = 100
"""Most rows that a plot shows: an image has a largest size."""

NARROW_INCHES = 4.0
"""Width of a plot for a narrow page. Its text is then as large as the page's."""


@dataclass(frozen=True)
class Family:
    """Methods that work alike, and how a plot shows them."""

    label: str
    marker: str
    light: str
    """Its colour on a light page."""
    dark: str
    """Its colour on a dark page."""


NOTHING = Family("nothing", "*", "#1f2933", "#e4e7eb")
OURS = Family("hf_pyao", "o", "#0b7a75", "#2fb5ad")
RECOMPUTE = Family("recompute", "^", "#d9822b", "#f0a35a")
OFFLOAD = Family("other offloading", "s", "#5b62b3", "#929af0")
FORWARD = Family("forward", "s", "#3b6fb6", "#6ea3e8")
BACKWARD = Family("backward", "s", "#7b5ea7", "#b195dc")
WAITING = Family("waiting for copies", "s", "#c0392b", "#ff7b6b")
RELOAD = Family("reload", "s", "#5f8f24", "#9ccb57")
QUIET = Family("", ".", "#7b8794", "#9aa5b1")
"""What belongs to none."""
FAMILIES = (NOTHING, OURS, RECOMPUTE, OFFLOAD)


@dataclass(frozen=True)
class Look:
    """The page that a plot is for."""

    is_dark: bool = False
    is_narrow: bool = False

    @property
    def ink(self) -> str:
        """Colour of text."""
        return "#e4e7eb" if self.is_dark else "#1f2933"

    @property
    def soft(self) -> str:
        """Colour of text beside."""
        return "#9aa5b1" if self.is_dark else "#616e7c"

    @property
    def line(self) -> str:
        """Colour of the grid."""
        return "#333f4a" if self.is_dark else "#e4e7eb"

    @property
    def back(self) -> str:
        """Colour of the page."""
        return "#171c21" if self.is_dark else "#ffffff"

    def colour(self, family: Family) -> str:
        """Return *family*'s colour."""
        return family.dark if self.is_dark else family.light

    def plain(self, text: str, longest: int = 60) -> str:
        """Return *text* as a label shows it: in one line, cut, and with no formula in it."""
        longest = min(longest, 60) if self.is_narrow else longest
        text = one_line(text)
        text = text if len(text) <= longest else f"{text[: longest - 1]}…"
        return text.replace("$", _DOLLAR)

    def wrapped(self, text: str, longest: int = 48) -> str:
        """Return a title or a label, in lines of so many characters if the page is narrow.

        A line ends at a space, or behind a sign between the words of a name; only a longer word is
        cut. None ends inside of what :meth:`plain` writes for a dollar sign.
        """
        if not self.is_narrow:
            return text
        lines = [""]
        for word in _WORD.findall(text.replace(_DOLLAR, "\0")):
            if lines[-1] and len(lines[-1] + word.rstrip()) > longest:
                lines.append("")
            lines[-1] += word
            while len(lines[-1].rstrip()) > longest:
                lines[-1:] = [lines[-1][:longest], lines[-1][longest:]]
        return "\n".join(line.rstrip() for line in lines).replace("\0", _DOLLAR)

    def figure(self, width: float, height: float) -> tuple[Figure, Axes]:
        """Return a figure of so many inches, narrower on a narrow page, with its axes."""
        from matplotlib.figure import Figure

        width = min(width, NARROW_INCHES) if self.is_narrow else width
        figure = Figure(figsize=(width, height), layout="constrained", facecolor=self.back)
        axes = figure.add_subplot()
        self.style(axes)
        return figure, axes

    def two_axes(
        self, width: float, height: float, ratios: Sequence[float] = (3, 2)
    ) -> tuple[Figure, tuple[Axes, Axes]]:
        """Return a figure with two axes beside each other, or on a narrow page one below."""
        figure, both, _ = self.two_axes_and_one(width, [height], ratios)
        return figure, both

    def two_axes_and_one(
        self, width: float, heights: Sequence[float], ratios: Sequence[float] = (3, 2)
    ) -> tuple[Figure, tuple[Axes, Axes], Axes | None]:
        """Return a figure with two axes as :meth:`two_axes`, and one below if there is a height."""
        from matplotlib.figure import Figure

        first_height, *others = heights
        rows = [first_height] * (2 if self.is_narrow else 1) + others
        width = NARROW_INCHES if self.is_narrow else width
        figure = Figure(figsize=(width, sum(rows)), layout="constrained", facecolor=self.back)
        if self.is_narrow:
            grid = figure.add_gridspec(len(rows), 1, height_ratios=rows)
            places = [grid[row, 0] for row in range(len(rows))]
        else:
            grid = figure.add_gridspec(len(rows), 2, height_ratios=rows, width_ratios=ratios)
            places = [grid[0, 0], grid[0, 1], *(grid[row, :] for row in range(1, len(rows)))]
        first, second, *below = [figure.add_subplot(place) for place in places]
        for axes in (first, second, *below):
            self.style(axes)
        return figure, (first, second), below[0] if below else None

    def style(self, axes: Axes) -> None:
        """Give *axes* these colours."""
        axes.set_facecolor(self.back)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("bottom", "left"):
            axes.spines[side].set_color(self.line)
        axes.tick_params(colors=self.ink, length=0, labelsize=9)
        axes.grid(visible=True, color=self.line, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.xaxis.label.set(color=self.ink, fontsize=9.5)
        axes.yaxis.label.set(color=self.ink, fontsize=9.5)

    def bars(
        self, axes: Axes, rows: Sequence[tuple[str, float, str]], texts: Sequence[str]
    ) -> None:
        """Draw bars from the top: label, value and colour of each, and the text at its end."""
        rows = rows[::-1]  # barh draws from the bottom
        values = [float(row[1]) for row in rows]
        colours = [row[2] for row in rows]
        labels = [self._bar_label(row[0]) for row in rows]
        bars = axes.barh(range(len(rows)), values, color=colours, height=0.66)
        axes.set_yticks(range(len(rows)), labels)
        behind = {"facecolor": self.back, "edgecolor": "none", "pad": 0.8}
        shown = list(texts)[::-1]
        axes.bar_label(bars, shown, padding=4, color=self.ink, fontsize=9, bbox=behind)
        axes.set_xlim(0, max(1e-9, *values) * (1.45 if self.is_narrow else 1.25))
        axes.grid(visible=False, axis="y")

    def bar_inches(self, names: Iterable[str], least: float) -> float:
        """Return the height of a bar: *least*, or more where labels of *names* would meet."""
        return max(least, *(0.17 * (1 + self._bar_label(name).count("\n")) for name in names))

    def _bar_label(self, name: str) -> str:
        return self.wrapped(self.plain(name), 24)


LIGHT = Look()
DARK = replace(LIGHT, is_dark=True)


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
