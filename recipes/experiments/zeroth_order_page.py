"""The page's parts and plots of ZO2's experiments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.page import bullets, paragraph, source, table
from experiments.plots import lines
from experiments.rows import MINIATURE, PREDICT, one, select
from experiments.zeroth_order import WAYS

HOST_QUANTITY = "update and packing on the host"
Read = Callable[[str], dict[str, Any] | None]


def overlap_section(read: Read) -> str:
    """Write the page's part on overlap."""
    parts = ["## ZO2, experiment 1: overlap of copies and compute"]
    if (found := read(PREDICT)) is None:
        return parts[0]
    rows = []
    whole = select(found["rows"], quantity="step")
    for row in (each for each in whole if each["system"].startswith("overlap")):
        times = row["system"].removeprefix("overlap, ")
        same = {"model": row["model"]}
        hidden = one(
            found["rows"],
            **same,
            system=row["system"],
            quantity="share of copies that is hidden",
        )
        others = [
            one(found["rows"], **same, system=f"{way}, {times}", quantity="step")["value"]
            for way in ("one slot", "no overlap")
        ]
        rows.append(
            [row["model"], times, f"{row['detail']['compute_ms']:.1f}",
             f"{row['detail']['copy_ms']:.1f}", f"{row['value']:.0f}",
             f"{row['detail']['busiest_lane_ms']:.0f}", *(f"{each:.0f}" for each in others),
             f"{hidden['value']:.1f}%",
             "" if hidden["published"] is None else f"{hidden['published']:.0f}%"]
        )  # fmt: skip
    clock = select(found["rows"], unit="x")
    parts += [
        paragraph(
            "*Mode: predict.* A step on the virtual clock, in ms, over the layers: with two slots; "
            "with one, so that uploads wait for compute; and with no overlap at all."
        ),
        table(
            [
                "model",
                "times",
                "compute",
                "copy",
                "step",
                "busiest lane",
                "one slot",
                "no overlap",
                "hidden",
                "published",
            ],
            rows,
        ),
        paragraph(
            "With the weight of embedding and head as blocks, too (the rows of a look-up, then the "
            "head in pieces no larger than a layer): a step after the first one over the busiest "
            "lane and one block's fill and drain, by the link's speed, and the first step so:"
        ),
        table(
            [
                "model",
                "pieces",
                "link, GB/s",
                "step, ms",
                "busiest lane, ms",
                "bound, ms",
                "ratio",
                "first step",
            ],
            [
                [
                    row["model"],
                    str(row["detail"]["num_pieces"]),
                    f"{row['detail']['link_gb_per_s']:g}",
                    f"{row['detail']['step_ms']:.0f}",
                    f"{row['detail']['busiest_lane_ms']:.0f}",
                    f"{row['detail']['bound_ms']:.0f}",
                    f"{row['value']:.3f}",
                    f"{row['detail']['first_step_ratio']:.3f}",
                ]
                for row in clock
            ],
        ),
        bullets(
            [
                "The published times of copies are one byte a parameter at 19 GB/s. float16 has "
                "twice the bytes, which is in the rows with a link's speed.",
                "Ratios above 1.02: a slot is taken for an upload, an update and a copy back, so "
                "with two slots a block takes at least half of their sum. On a slow link, where "
                "both copies are the busiest lanes, that is half an update a block more than a "
                "copy.",
                "What is not hidden is the first upload of the first step, the last copy back, and "
                "all that is above compute where the link is the busiest lane. From the second "
                "step on, the first block is uploaded while the step before ends; with "
                "`transfer_dtype` it is not, as its update is made on the host.",
            ]
        ),
        source(found),
    ]
    return "\n\n".join(parts)


def compression_section(read: Read) -> str:
    """Write the page's part on compression."""
    parts = ["## ZO2, experiment 2: the dtype of weights and transfers"]
    found, small = read(PREDICT), read(MINIATURE)
    if found is not None:
        quantities = ("step", "step at 6.25 GB/s", "device memory", "host memory")
        names = list(dict.fromkeys(row["model"] for row in found["rows"]))
        rows = [
            [name, way.name]
            + [
                f"{one(found['rows'], model=name, system=way.name, quantity=each)['value']:.2f}"
                for each in quantities
            ]
            + [_on_host(small, one(found["rows"], model=name, system=way.name, quantity="step"))]
            for name in names
            for way in WAYS
        ]
        parts += [
            paragraph(
                "*Mode: predict.* Steps in ms on the clock, memory in GB of 1e9 bytes. *Host* is "
                "what `transfer_dtype` lets the host do in a step, in s of processor time: update "
                "and packing of the weights, from the time of an element that was measured below. "
                "The clock's steps do not have it. It runs beside compute, but it is the longest "
                "lane by far unless many cores share it: `transfer_dtype` is for links that are "
                "slower than that."
            ),
            table(["model", "weights", *quantities, "host"], rows),
            source(found),
        ]
    if small is not None:
        task = select(small["rows"], model="separable task")
        cells = []
        for system in dict.fromkeys(row["system"] for row in task):
            loss, accuracy = (
                one(task, system=system, quantity=each) for each in ("loss at the end", "accuracy")
            )
            seeds = loss["detail"]["by_seed"]
            cells.append(
                [system, f"{loss['value']:.4f}", f"{min(seeds):.4f} to {max(seeds):.4f}",
                 f"{accuracy['value']:.2f}"]
            )  # fmt: skip
        parts += [
            paragraph(
                "*Mode: miniature.* A task that a plane separates, trained on this CPU; means over "
                "five seeds. First order is beside it for honesty: it needs fewer steps for the "
                "same loss. Visiting and resident layers give the same losses, to the bit."
            ),
            table(["run", "loss at the end", "over seeds", "accuracy, %"], cells),
            table(
                ["update and packing on the host", "ns of processor time an element"],
                [
                    [row["system"], f"{row['value']:.1f}"]
                    for row in select(small["rows"], quantity=HOST_QUANTITY)
                ],
            ),
            source(small),
        ]
    return "\n\n".join(parts)


def _on_host(small: dict[str, Any] | None, step: dict[str, Any]) -> str:
    """Return the seconds of a step that the host takes for updates and packing, if any."""
    found = select(small["rows"], quantity=HOST_QUANTITY) if small is not None else []
    ns = next((row["value"] for row in found if row["system"] == step["system"]), None)
    if ns is None:
        return ""
    elements = step["detail"]["num_layers"] * step["detail"]["block_parameters"]
    return f"{elements * ns * 1e-9:.1f}"


def scaling_section(read: Read) -> str:
    """Write the page's part on scaling."""
    parts = ["## ZO2, experiment 3: memory and throughput over the model's size"]
    if (found := read(PREDICT)) is None:
        return parts[0]
    rows = []
    for name in dict.fromkeys(row["model"] for row in found["rows"]):
        device, host, speed = (
            one(found["rows"], model=name, quantity=each)
            for each in ("device memory", "host memory", "throughput")
        )
        published = "" if device["published"] is None else f"{device['published']:.2f}"
        rows.append(
            [name, published, f"{device['value']:.2f}", f"{host['value']:.2f}",
             f"{speed['value']:.0f}"]
        )  # fmt: skip
    parts += [
        paragraph(
            "*Mode: predict.* float16, GB of 1e9 bytes. Throughput is that of the clock without "
            "the noise's kernels; none is published in the text."
        ),
        table(["model", "published, GB", "device, GB", "host, GB", "tokens/s"], rows),
        source(found),
    ]
    return "\n\n".join(parts)


def plot_scaling(document: dict[str, Any]) -> Any:
    """Draw device memory by model size."""
    found = select(document["rows"], quantity="device memory")
    points = [
        (panel, name, float(number), float(row[key]))
        for number, row in enumerate(found)
        for panel, name, key in (
            ("device memory", "ours", "value"),
            ("device memory", "published", "published"),
        )
        if row[key] is not None
    ]
    return lines(points, "model, from 125M to 30B", "GB")


def plot_task(document: dict[str, Any]) -> Any:
    """Draw the losses of the separable task; of predictions, the steps over a slow link."""
    if document["mode"] != MINIATURE:
        found = select(document["rows"], quantity="step at 6.25 GB/s")
        names = list(dict.fromkeys(row["model"] for row in found))
        points = [
            ("6.25 GB/s", row["system"], float(names.index(row["model"])), row["value"])
            for row in found
        ]
        return lines(points, f"model: {', '.join(names)}", "ms of a step")
    points = []
    for row in select(document["rows"], quantity="loss at the end"):
        endings = [way.name for way in WAYS if row["system"].endswith(f", {way.name}")]
        panel = max(endings, key=len)
        run = row["system"].removesuffix(f", {panel}")
        points += [(panel, run, float(step), float(loss)) for step, loss in row["detail"]["curve"]]
    return lines(points, "step", "loss")
