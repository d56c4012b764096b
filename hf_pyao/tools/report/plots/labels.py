"""Labels beside the points of a plot, where none covers a point or another label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OFFSETS = [
    (9, 0, "left", "center"),
    (-9, 0, "right", "center"),
    (0, 10, "center", "bottom"),
    (0, -10, "center", "top"),
    *(
        (side * 9 * reach, rise * 11 * reach, "left" if side > 0 else "right", "center")
        for reach in (1, 2, 3, 4, 5)
        for side in (1, -1)
        for rise in (1, -1)
    ),
]
"""Where a label may stand from its point, in points of 1/72 inch, the best places first."""

_POINT_RADIUS = 6.0
_BAR_RADIUS = 3.0


def place_labels(
    figure: Figure,
    axes: Axes,
    points: Sequence[tuple[float, float, str, str]],
    bars: Sequence[tuple[float, float, float]] = (),
) -> list[Any]:
    """Write each point's label at the first place that is free, else at the least crowded one.

    *points*: x, y, text, colour. *bars*: horizontal lines that labels should not cross, as left x,
    right x, y. A label that stands away from its point gets a thin line to it.
    Returns the labels' boxes in pixels (matplotlib's ``Bbox``).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    canvas: Any = FigureCanvasAgg(figure)
    renderer = canvas.get_renderer()
    figure.draw(renderer)  # the layout decides where the points are
    inside = axes.get_window_extent(renderer)
    legend = axes.get_legend()
    taken = [] if legend is None else [legend.get_window_extent(renderer)]
    for x, y, *_ in points:
        centre = axes.transData.transform((x, y))
        taken.append(Bbox([centre - _POINT_RADIUS, centre + _POINT_RADIUS]))
    for left, right, y in bars:
        ends = axes.transData.transform([(left, y), (right, y)])
        taken.append(Bbox([ends[0] - _BAR_RADIUS, ends[1] + _BAR_RADIUS]))
    boxes = []
    for x, y, text, colour in points:
        best = None
        for dx, dy, horizontal, vertical in _OFFSETS:
            label = axes.annotate(
                text,
                (x, y),
                xytext=(dx, dy),
                textcoords="offset points",
                ha=horizontal,
                va=vertical,
                fontsize=8.5,
                color=colour,
                arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6}
                if abs(dy) > 12
                else None,
            )
            box = _text_box(label, renderer)
            outside = not (inside.x0 <= box.x0 and box.x1 <= inside.x1 + 60)
            crowd = sum(box.overlaps(other) for other in taken) + 10 * outside
            if best is None or crowd < best[0]:
                if best is not None:
                    best[1].remove()
                best = (crowd, label, box)
            else:
                label.remove()
            if best[0] == 0:
                break
        assert best is not None
        taken.append(best[2])
        boxes.append(best[2])
    return boxes


def _text_box(label: Any, renderer: Any) -> Any:
    """Return the box of the text alone, without its line."""
    from matplotlib.text import Text

    label.update_positions(renderer)
    return Text.get_window_extent(label, renderer)
