"""The plot of a plan: bytes by what becomes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_pyao.report.plan_report import KEEP, OFFLOAD, RECOMPUTE, Plan
from hf_pyao.report.plan_view import bytes_by_action, num_layers
from hf_pyao.report.plots import look as looks
from hf_pyao.report.plots.look import LIGHT, Look
from hf_pyao.report.quantities import GIB, MIB, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FAMILIES = {KEEP: looks.RECOMPUTE, OFFLOAD: looks.OURS, RECOMPUTE: looks.OFFLOAD}


def plan_figure(plan: Plan, look: Look = LIGHT) -> Figure | None:
    """Return the bytes of each action as bars; None if the plan holds no sizes."""
    sizes = bytes_by_action(plan)
    if not sizes:
        return None
    figure, axes = look.figure(8.6, 1.3 + 0.34 * len(sizes))
    scale, unit = (GIB, "GiB") if max(sizes.values()) >= GIB else (MIB, "MiB")
    rows = [
        (action, size / scale, look.colour(_FAMILIES[action])) for action, size in sizes.items()
    ]
    look.bars(axes, rows, [number(value) for _, value, _ in rows])
    per = "micro-batch" if num_layers(plan) > 1 else "layer, or named layers"
    axes.set_xlabel(look.wrapped(f"{unit} of the named slots, per {per}", 36))
    return figure
