"""The page's part and the plot of the guide's inequality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.hiding import CARDS, LINKS_GB_PER_S
from experiments.page import bullets, paragraph, source, table
from experiments.rows import PREDICT, one, select
from experiments.systems import MODELS

Read = Callable[[str], dict[str, Any] | None]


def inequality_section(read: Read) -> str:
    """Write the page's part on the guide's inequality."""
    found = read(PREDICT)
    parts = ["## The guide's inequality: where a transfer hides under compute"]
    if found is None:
        return parts[0]
    own = [
        [row["system"], row["quantity"], f"{row['published']:g} {row['unit']}",
         f"{row['value']:.1f} {row['unit']}"]
        for row in found["rows"]
        if row["published"] is not None
    ]  # fmt: skip
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
    parts += [
        paragraph("*Mode: predict.* The guide's own example (a 2 GiB shard under 20 ms) first:"),
        table(["", "", "guide", "ours"], own),
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
        source(found),
    ]
    return "\n\n".join(parts)


def plot_inequality(document: dict[str, Any]) -> Any:
    """Draw the step over keeping all, by link, a panel for each model."""
    from experiments.plots import lines

    points = []
    for row in select(document["rows"], figure="inequality", unit="x"):
        for link, speed in LINKS_GB_PER_S.items():
            if row["quantity"] == f"step with {link} over keeping all":
                points.append((row["model"], row["system"], speed, row["value"]))
    figure = lines(points, "link, GB/s each way", "step over keeping all")
    for axes in figure.axes:
        axes.set_xscale("log")
    return figure
