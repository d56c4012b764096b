"""The plot of a training run: where a micro-batch's bytes were, what its copies cost, and what
became of each layer's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_pyao.plan.documents.run import LayerBytes, RunReport
from hf_pyao.quantities import GIB, MIB, number
from hf_pyao.tools.report.plots.look import (
    INK,
    NOTHING,
    OFFLOAD,
    OURS,
    QUIET,
    RECOMPUTE,
    RELOAD,
    bars,
    two_axes,
)
from hf_pyao.tools.report.views.run_view import RUN_FIGURES, kept_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZES = (
    ("would_hold_bytes", NOTHING),
    ("held_bytes", RECOMPUTE),
    ("offloaded_bytes", OURS),
    ("recomputed_bytes", OFFLOAD),
)
_TIMES = (
    ("transfer_ms", OURS),
    ("stall_forward_ms", RECOMPUTE),
    ("stall_backward_ms", RECOMPUTE),
)


def run_figure(report: RunReport) -> Figure | None:
    """Return the plot of a run; None if it had no micro-batch."""
    if not report.totals.get("num_micro_batches"):
        return None
    num_micro_batches = max(1, report.totals["num_micro_batches"])
    labels = dict(RUN_FIGURES)

    def mean(key: str) -> float:
        return float(report.totals.get(key, 0)) / num_micro_batches

    sizes = [
        (labels[key], mean(key), family.colour)
        for key, family in _SIZES
        if key != "recomputed_bytes" or mean(key)
    ]
    sizes += [
        (f"kept: {reason}", mean(f"kept_bytes/{reason}"), QUIET.colour)
        for reason, _ in kept_rows(report)[:5]
    ]
    times = [(labels[key], mean(key), family.colour) for key, family in _TIMES]
    heights = [1.9 + 0.34 * len(sizes)]
    if report.layers:
        heights.append(2.6)
    figure, (left, right), below = two_axes(11.0, heights)
    scale, unit = (GIB, "GiB") if max(size for _, size, _ in sizes) >= GIB else (MIB, "MiB")
    _draw(left, [(label, size / scale, colour) for label, size, colour in sizes])
    left.set_xlabel(f"{unit} per micro-batch, mean over the run")
    left.set_title("saved for backward", loc="left", fontsize=10, color=INK)
    _draw(right, times)
    right.set_xlabel("ms per micro-batch, mean over the run")
    title = "copies, and waits for them"
    right.set_title(title, loc="left", fontsize=10, color=INK)
    if below is not None:
        _draw_layers(below, report.layers)
    return figure


_STRIP = (
    ("kept_bytes", "kept", RECOMPUTE),
    ("moved_bytes", "moved", OURS),
    ("recomputed_bytes", "recomputed", OFFLOAD),
    ("streamed_weight_bytes", "streamed weights", RELOAD),
)
"""What a layer's bar consists of, from below."""


def _draw_layers(axes: Axes, layers: Sequence[LayerBytes]) -> None:
    """Draw a bar for each layer, in forward order, of what became of its bytes."""
    from matplotlib.ticker import MaxNLocator

    numbers = range(len(layers))
    most = max(sum(getattr(layer, key) for key, *_ in _STRIP) for layer in layers)
    scale, unit = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    bottom = [0.0] * len(layers)
    for key, label, family in _STRIP:
        sizes = [getattr(layer, key) / scale for layer in layers]
        if any(sizes):
            colour = family.colour
            axes.bar(numbers, sizes, 0.86, bottom=bottom, color=colour, label=label)
            bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
    axes.set_xlim(-0.6, len(layers) - 0.4)
    axes.set_ylim(0, max(1e-9, *bottom) * 1.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("layer, in forward order")
    axes.set_ylabel(f"{unit} per micro-batch")
    title = "what became of each layer's bytes"
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    figure = axes.figure
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower right",  # inside, it would cover bars
        frameon=False,
        labelcolor=INK,
        fontsize=8.5,
        ncols=4,
    )


def _draw(axes: Axes, rows: list[tuple[str, float, str]]) -> None:
    bars(axes, rows, [number(value) for _, value, _ in rows])
