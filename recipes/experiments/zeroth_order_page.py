"""The page's parts and plots of ZO2's experiments."""

from __future__ import annotations

from functools import partial
from typing import Any

from experiments.page import bullets, paper, paragraph, table, table_of
from experiments.plots import lines
from experiments.rows import MINIATURE, one, read_document, result_path, select, values
from experiments.zeroth_order import WAYS

HOST_QUANTITY = "update and packing on the host"


def predicted_overlap(found: dict[str, Any]) -> list[str]:
    """Write of experiment 1, predicted."""
    steps = select(found["rows"], quantity="step")

    def times(row: dict[str, Any]) -> str:
        return str(row["system"]).removeprefix("overlap, ")

    def other(way: str, row: dict[str, Any]) -> str:
        step = one(steps, model=row["model"], system=f"{way}, {times(row)}")
        return f"{step['value']:.0f}"

    def hidden(row: dict[str, Any]) -> dict[str, Any]:
        return one(found["rows"], model=row["model"], system=row["system"], unit="%")

    return [
        paragraph(
            "*Mode: predict.* A step on the virtual clock, in ms, over the layers: with two slots; "
            "with one, so that uploads wait for compute; and with no overlap at all."
        ),
        table_of(
            [row for row in steps if row["system"].startswith("overlap")],
            ("model", "{model}"),
            ("times", times),
            ("compute", "{detail[compute_ms]:.1f}"),
            ("copy", "{detail[copy_ms]:.1f}"),
            ("step", "{value:.0f}"),
            ("busiest lane", "{detail[busiest_lane_ms]:.0f}"),
            ("one slot", partial(other, "one slot")),
            ("no overlap", partial(other, "no overlap")),
            ("hidden", lambda row: f"{hidden(row)['value']:.1f}%"),
            ("published", lambda row: paper("{published:.0f}%")(hidden(row))),
        ),
        bullets(
            [
                "The published times of copies are one byte a parameter at 19 GB/s. float16 has "
                "twice the bytes, which is in the rows with a link's speed.",
                "A block is uploaded for each of both passes, which run one after the other, and "
                "copied back in the first one. The paper's blocks are uploaded once. The second "
                "upload is hidden where a pass takes longer than a copy, as at the published "
                "times.",
                "The noise is not counted: with plain torch kernels each of its three draws of an "
                "element moves about a kilobyte on the device, which takes longer than a copy of "
                "the element over a link of 6.25 GB/s.",
                "What is not hidden is the first upload of the first step, the last copy back, and "
                "all that is above compute where the link is the busiest lane. From the second "
                "step on, the first block is uploaded while the step before ends; with "
                "`transfer_dtype` it is not, as its update is made on the host.",
                "Up to version 0.1 both passes ran side by side, and the weight of embedding and "
                "head could visit by rows; commit `12332b10da7c` has the rows for that.",
            ]
        ),
    ]


def predicted_compression(found: dict[str, Any]) -> list[str]:
    """Write of experiment 2, predicted; the miniature's result file has the host's times."""
    quantities = ("step", "step at 6.25 GB/s", "device memory", "host memory")
    path = result_path("zeroth_order_compression", MINIATURE)
    host = select(read_document(path)["rows"], quantity=HOST_QUANTITY) if path.exists() else []
    rows = []
    for name in values(found["rows"], "model"):
        for way in WAYS:
            step, *others = (
                one(found["rows"], model=name, system=way.name, quantity=each)
                for each in quantities
            )
            cells = [f"{row['value']:.2f}" for row in (step, *others)]
            rows.append([name, way.name, *cells, _on_host(host, step)])
    return [
        paragraph(
            "*Mode: predict.* Steps in ms on the clock, memory in GB of 1e9 bytes. *Host* is "
            "what `transfer_dtype` lets the host do in a step, in s of processor time: update "
            "and packing of the weights, from the time of an element that was measured below. "
            "The clock's steps do not have it. It runs beside compute, but it is the longest "
            "lane by far unless many cores share it: `transfer_dtype` is for links that are "
            "slower than that. Rows of bfloat16 on the way went with that format; commit "
            "`12332b10da7c` has them."
        ),
        table(["model", "weights", *quantities, "host"], rows),
    ]


def trained_compression(small: dict[str, Any]) -> list[str]:
    """Write of experiment 2, in miniature."""
    losses, accuracies = (
        select(small["rows"], quantity=each) for each in ("loss at the end", "accuracy")
    )

    def over_seeds(row: dict[str, Any]) -> str:
        seeds = row["detail"]["by_seed"]
        return f"{min(seeds):.4f} to {max(seeds):.4f}"

    return [
        paragraph(
            "*Mode: miniature.* A task that a plane separates, trained on this CPU; means over "
            "five seeds. First order is beside it for honesty: it needs fewer steps for the "
            "same loss. Visiting and resident layers give the same losses, to the bit."
        ),
        table_of(
            losses,
            ("run", "{system}"),
            ("loss at the end", "{value:.4f}"),
            ("over seeds", over_seeds),
            ("accuracy, %", lambda row: f"{one(accuracies, system=row['system'])['value']:.2f}"),
        ),
        table_of(
            select(small["rows"], quantity=HOST_QUANTITY),
            ("update and packing on the host", "{system}"),
            ("ns of processor time an element", "{value:.1f}"),
        ),
    ]


def _on_host(host: list[dict[str, Any]], step: dict[str, Any]) -> str:
    """Return the seconds of a step that the host takes for updates and packing, if any."""
    of_way = select(host, system=step["system"])
    if not of_way:
        return ""
    elements = step["detail"]["num_layers"] * step["detail"]["block_parameters"]
    return f"{elements * of_way[0]['value'] * 1e-9:.1f}"


def predicted_scaling(found: dict[str, Any]) -> list[str]:
    """Write of experiment 3, predicted."""

    def value(quantity: str, cell: str, row: dict[str, Any]) -> str:
        return cell.format(**one(found["rows"], model=row["model"], quantity=quantity))

    return [
        paragraph(
            "*Mode: predict.* float16, GB of 1e9 bytes. Throughput is that of the clock without "
            "the noise's kernels; none is published in the text."
        ),
        table_of(
            select(found["rows"], quantity="device memory"),
            ("model", "{model}"),
            ("published, GB", paper("{published:.2f}")),
            ("device, GB", "{value:.2f}"),
            ("host, GB", partial(value, "host memory", "{value:.2f}")),
            ("tokens/s", partial(value, "throughput", "{value:.0f}")),
        ),
    ]


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
        names = values(found, "model")
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
