"""The plot of a profile: the activation throughput of each part of a layer."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from hf_pyao.plan.documents.profile import Profile
from hf_pyao.tools.report.plots.look import LIGHT, MOST_ROWS, OFFLOAD, OURS, RECOMPUTE, Look

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def throughput_figure(profile: Profile, look: Look = LIGHT) -> Figure | None:
    """Return the activation throughput of each part of a layer (PyAO paper, Figure 2), as bars.

    Lines are the link's speed and the bound above which throughputs are outliers.
    """
    rows = [row for row in profile.modules if row.throughput_gib_per_s is not None][:MOST_ROWS]
    rows.sort(key=lambda row: -(row.throughput_gib_per_s or 0.0))
    if not rows:
        return None
    values = [row.throughput_gib_per_s or 0.0 for row in rows]
    figure, axes = look.figure(8.6, 1.9 + 0.34 * len(rows))
    ours = look.colour(OURS)
    shown = [
        (row.path or "(the layer itself)", value, ours)
        for row, value in zip(rows, values, strict=True)
    ]
    look.bars(axes, shown, [f"{value:.3g}" for value in values])
    lines = [("the link's speed", profile.link_gib_per_s, look.colour(RECOMPUTE), "--")]
    if len(values) > 1:
        lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
        bound = upper + 1.5 * (upper - lower)
        lines.append(("Q3 + 1.5 IQR", bound, look.colour(OFFLOAD), ":"))
    for label, value, colour, style in lines:
        if value is not None:
            axes.axvline(value, color=colour, linestyle=style, label=f"{label}, {value:.3g}")
    room = 1.35 if look.is_narrow else 1.18
    axes.set_xlim(0, max([*values, *(value or 0.0 for _, value, _, _ in lines), 1e-9]) * room)
    more = "" if look.is_narrow else ": bytes over the time between saved tensors"
    axes.set_xlabel(f"activation throughput, GiB/s{more}")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(
            loc="outside upper right",
            ncols=1 if look.is_narrow else 2,
            frameon=False,
            labelcolor=look.ink,
            fontsize=9,
        )
    if not look.is_narrow:
        axes.set_title(look.plain(profile.title), color=look.ink, fontsize=11, loc="left")
    return figure
