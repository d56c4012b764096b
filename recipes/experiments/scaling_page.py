"""The page's part and the plots of the communication model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.calibration import LINK_BOUND
from experiments.page import bullets, paragraph, source, table
from experiments.rows import MINIATURE, PREDICT, one, select
from experiments.scaling import CHANGES, LINKS_GBIT_PER_S, NODES, SPLITS
from experiments.systems import ACCUMULATION, CHECKPOINTING, PYAO

GOALS = {"link_bound": (0.05, 0.10), "others": (0.10, 0.20)}
"""Mean and largest error that were set as goals beforehand."""

Read = Callable[[str], dict[str, Any] | None]


def section(read: Read) -> str:
    """Write the page's part on the communication model."""
    parts = [
        "## Where a larger micro-batch pays: the communication model",
        paragraph(
            "step = compute(micro-batch) + communication(engine, nodes, link) + optimizer; what "
            "an engine sends is in the note at the top of `communication.py`. Per optimizer step "
            "of *gas* micro-batches each node sends c (N − 1)/N times the gradient's bytes: DDP c "
            "= 2, ZeRO-1 3, ZeRO-2 2 gas + 1, ZeRO-3 3 gas."
        ),
    ]
    found, small = read(PREDICT), read(MINIATURE)
    if small is not None:
        parts += [_calibrated(small), source(small)]
    if found is not None:
        parts += [_grid(found), _changes(found), _limits(found), source(found)]
    return "\n\n".join(parts)


def _calibrated(document: dict[str, Any]) -> str:
    rows = [
        [
            row["model"],
            row["system"],
            str(row["micro_batch"]),
            f"{row['value']:.3f}",
            f"{row['detail']['predicted_s']:.3f}",
            f"{row['detail']['error']:+.1%}",
            f"{row['detail']['communication_share']:.0%}",
        ]
        for row in document["rows"]
    ]
    heads = ["model", "cluster", "micro-batch", "measured, s", "model, s", "error", "communication"]
    told = [_told(document, how, rule) for how, rule in SPLITS.items()]
    return "\n\n".join(
        [
            paragraph("*Mode: miniature.* The model against what the local cluster measured:"),
            bullets(told),
            paragraph(
                "Medians of the runs of each sweep. Compute is a step with the links unshaped, "
                "less what its collectives take alone there, where the bytes of all nodes pass "
                "through one machine's cores. What seems to pass under compute is mostly what a "
                "shaped link lets through at once after each pause: its token bucket holds a few "
                "hundredths of what a node sends in a step. The rows are of the first of the two."
            ),
            table(heads, rows),
        ]
    )


def _told(document: dict[str, Any], how: str, rule: str) -> str:
    words = []
    for name, what in (
        ("link_bound", f"where communication is {LINK_BOUND:.0%} of the step or more"),
        ("others", "elsewhere"),
    ):
        errors = document["errors"][how][name]
        if not errors["num_points"]:
            words.append(f"{what} there is no point")
            continue
        goal, most = GOALS[name]
        is_met = errors["mean"] <= goal and errors["largest"] <= most
        words.append(
            f"{what} the mean error is {errors['mean']:.1%} and the largest "
            f"{errors['largest']:.1%} ({errors['num_points']} points; the goal is {goal:.0%} and "
            f"{most:.0%}: {'met' if is_met else 'missed'})"
        )
    fit = document["calibration"][how]
    return (
        f"{how}. {rule[0].upper()}{rule[1:]}. The fit to {fit['num_points']} points has a link "
        f"of efficiency {fit['efficiency']:.3f} of whose communication {fit['overlap']:.1%} passes "
        f"under compute. Of what is held out, {'; '.join(words)}."
    )


def _grid(document: dict[str, Any]) -> str:
    rows = []
    for model in dict.fromkeys(row["model"] for row in document["rows"]):
        for num_nodes in NODES:
            cells = [model, str(num_nodes)]
            for link in LINKS_GBIT_PER_S:
                cells.append(
                    " / ".join(
                        f"{_value(document, model, name, num_nodes, link):.2f}"
                        for name in (PYAO.name, CHECKPOINTING.name, ACCUMULATION.name)
                    )
                )
            rows.append(cells)
    heads = ["model", "nodes", *(f"{link:g} Gbit/s" for link in LINKS_GBIT_PER_S)]
    return (
        paragraph(
            "*Mode: predict.* How much sooner 40 samples of each node are accumulated than with "
            "ZeRO-2 at micro-batch 4: PyAO under ZeRO-2 at 10 / checkpointing under ZeRO-2 at 10 "
            "/ ZeRO-1 with plain accumulation at 4."
        )
        + "\n\n"
        + table(heads, rows)
    )


def _value(
    document: dict[str, Any],
    model: str,
    system: str,
    num_nodes: int,
    link: float,
    change: str = "as it is",
) -> float:
    for row in select(document["rows"], model=model, system=system):
        detail = row["detail"]
        if (detail["nodes"], detail["gbit_per_s"], detail["change"]) == (num_nodes, link, change):
            return float(row["value"])
    raise LookupError(f"no row of {model}, {system}, {num_nodes} nodes, {link} Gbit/s, {change}")


def _changes(document: dict[str, Any]) -> str:
    model = "OPT-1.3B"
    rows = []
    for change in CHANGES:
        cells = [change]
        for link in (1.0, 10.0):
            for name in (PYAO.name, CHECKPOINTING.name, ACCUMULATION.name):
                cells.append(f"{_value(document, model, name, 5, link, change):.2f}")
        rows.append(cells)
    names = ("PyAO", "checkpointing", "ZeRO-1")
    heads = ["", *(f"{name}, {link} Gbit/s" for link in (1, 10) for name in names)]
    return (
        paragraph(
            f"The same for {model} on five nodes that are not equal, or share their host's memory "
            "(each over ZeRO-2 at micro-batch 4 under the same circumstances):"
        )
        + "\n\n"
        + table(heads, rows)
    )


def _limits(document: dict[str, Any]) -> str:
    slow = one(
        [
            row
            for row in select(document["rows"], model="OPT-1.3B", system=PYAO.name)
            if row["detail"]["nodes"] == 5
            and row["detail"]["gbit_per_s"] == 100.0
            and row["detail"]["change"] == "as it is"
        ]
    )
    return bullets(
        [
            "A larger micro-batch gains at most the ratio of the micro-batches, 2.5 here, and "
            f"only over slow links: at 100 Gbit/s PyAO comes to {slow['value']:.2f} for OPT-1.3B "
            "on five nodes. More nodes change little, since a ring sends (N − 1)/N; what grows is "
            "the latency of its messages.",
            "ZeRO-1 with plain accumulation is ahead on every slow link: it sends once what "
            "ZeRO-2 sends at every micro-step. A larger micro-batch pays against ZeRO-2 and "
            "ZeRO-3, and where the gradients of ZeRO-1 do not fit beside the activations.",
            "Checkpointing at the same micro-batch loses its second forward, which a slow link "
            "hides in the ratio.",
            "Limits: rings alone, no overlap with backward, no contention in switches; memory is "
            "not asked for (OPT-6.7B does not fit into the card).",
        ]
    )


def plot(document: dict[str, Any]) -> Any:
    """Draw the speedup over the link, a panel for each model, on five nodes."""
    from experiments.plots import lines

    if document["mode"] != PREDICT:
        points = []
        for row in document["rows"]:
            points.append(("held-out points", row["system"], row["micro_batch"], row["value"]))
        return lines(points, "micro-batch", "s of a step")
    points = [
        (row["model"], row["system"], row["detail"]["gbit_per_s"], row["value"])
        for row in document["rows"]
        if row["detail"]["nodes"] == 5 and row["detail"]["change"] == "as it is"
    ]
    figure = lines(points, "link, Gbit/s", "times as fast as ZeRO-2 at micro-batch 4")
    for axes in figure.axes:
        axes.set_xscale("log")
    return figure
