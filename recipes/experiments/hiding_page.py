"""The page's part and the plot of the guide's inequality."""

from __future__ import annotations

from typing import Any

from experiments.hiding import CARDS, LINKS_GB_PER_S
from experiments.page import bullets, paragraph, table, table_of
from experiments.plots import lines
from experiments.rows import one, select
from experiments.systems import MODELS


def predicted_inequality(found: dict[str, Any]) -> list[str]:
    """Write of the guide's inequality, predicted."""
    rows = []
    for name in MODELS.values():
        for card in CARDS:
            needs = [
                one(
                    found["rows"],
                    model=name,
                    system=f"{card}, {codec}",
                    quantity="slowest link that hides a layer's forward",
                )["value"]
                for codec in ("identity", "int8")
            ]
            cells = [name, card, *(f"{value:.1f}" for value in needs)]
            for link in LINKS_GB_PER_S:
                row = one(
                    found["rows"],
                    model=name,
                    system=f"{card}, identity",
                    quantity=f"step with {link} over keeping all",
                )
                cells.append(f"{row['value']:.2f} ({row['detail']['guide']:.2f})")
            again = one(found["rows"], model=name, system=f"{card}, checkpointing")
            rows.append([*cells, f"{again['value']:.2f}"])
    return [
        paragraph("*Mode: predict.* The guide's own example (a 2 GiB shard under 20 ms) first:"),
        table_of(
            [row for row in found["rows"] if row["published"] is not None],
            ("", "{system}"),
            ("", "{quantity}"),
            ("guide", "{published:g} {unit}"),
            ("ours", "{value:.1f} {unit}"),
        ),
        paragraph(
            "Then each model at micro-batch 4, all of it offloaded layer by layer: the slowest "
            "link (GB/s of 1e9) that hides what a layer saves under its own forward, and the step "
            "over one that keeps all, in brackets by the guide's max(compute, transfer) with all "
            "of a step's copies and compute in one pot."
        ),
        table(["model", "card", "needs", "needs, int8", *LINKS_GB_PER_S, "checkpointing"], rows),
        bullets(
            [
                "The guide's example is arithmetic and comes out; its C2C link is both ways "
                "together, so that one way carries 450.",
                "The bracket is the lower bound: a copy starts when its tensor is saved, and a "
                "layer waits at its end, so that ours is above it where both are near.",
                "int8 needs half the link or less, but for its kernels' time, which is not in it.",
                "Where a column is above checkpointing's, offloading everything on that link is "
                "slower than computing it again. ZeRO-1 and the chunked loss change neither the "
                "layers' bytes nor their compute.",
            ]
        ),
    ]


def plot_inequality(document: dict[str, Any]) -> Any:
    """Draw the step over keeping all, by link, a panel for each model."""
    points = []
    for row in select(document["rows"], unit="x"):
        for link, speed in LINKS_GB_PER_S.items():
            if row["quantity"] == f"step with {link} over keeping all":
                points.append((row["model"], row["system"], speed, row["value"]))
    figure = lines(points, "link, GB/s each way", "step over keeping all")
    for axes in figure.axes:
        axes.set_xscale("log")
    return figure
