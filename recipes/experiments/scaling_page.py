"""The page's part and the plots of the communication model."""

from __future__ import annotations

from typing import Any

from experiments.calibration import LINK_BOUND
from experiments.page import bullets, paragraph, table, table_of
from experiments.plots import lines
from experiments.rows import PREDICT, select, values
from experiments.scaling import AS_IT_IS, CHANGES, LINKS_GBIT_PER_S, NODES, SPLITS
from experiments.systems import ACCUMULATION, CHECKPOINTING, PYAO

GOALS = {"link_bound": (0.05, 0.10), "others": (0.10, 0.20)}
"""Mean and largest error that were set as goals beforehand."""


INTRODUCTION = paragraph(
    "step = compute(micro-batch) + communication(engine, nodes, link) + optimizer; what an engine "
    "sends is in the note at the top of `communication.py`. Per optimizer step of *gas* "
    "micro-batches each node sends c (N − 1)/N times the gradient's bytes: DDP c = 2, ZeRO-1 3, "
    "ZeRO-2 2 gas + 1, ZeRO-3 3 gas."
)


def calibrated(document: dict[str, Any]) -> list[str]:
    """Write of the model beside what the local cluster measured."""
    return [
        paragraph("*Mode: miniature.* The model against what the local cluster measured:"),
        bullets([_told(document, how, rule) for how, rule in SPLITS.items()]),
        paragraph(
            "Medians of the runs of each sweep. Compute is a step with the links unshaped, "
            "less what its collectives take alone there, where the bytes of all nodes pass "
            "through one machine's cores. What seems to pass under compute is mostly what a "
            "shaped link lets through at once after each pause: its token bucket holds a few "
            "hundredths of what a node sends in a step. The rows are of the first of the two."
        ),
        table_of(
            document["rows"],
            ("model", "{model}"),
            ("cluster", "{system}"),
            ("micro-batch", "{micro_batch}"),
            ("measured, s", "{value:.3f}"),
            ("model, s", "{detail[predicted_s]:.3f}"),
            ("error", "{detail[error]:+.1%}"),
            ("communication", "{detail[communication_share]:.0%}"),
        ),
    ]


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


def predicted_grid(document: dict[str, Any]) -> list[str]:
    """Write of where a larger micro-batch pays."""
    rows = []
    for model in values(document["rows"], "model"):
        for num_nodes in NODES:
            cells = [
                " / ".join(_speedups(document, model, num_nodes, link)) for link in LINKS_GBIT_PER_S
            ]
            rows.append([model, str(num_nodes), *cells])
    heads = ["model", "nodes", *(f"{link:g} Gbit/s" for link in LINKS_GBIT_PER_S)]
    return [
        paragraph(
            "*Mode: predict.* How much sooner 40 samples of each node are accumulated than with "
            "ZeRO-2 at micro-batch 4: PyAO under ZeRO-2 at 10 / checkpointing under ZeRO-2 at 10 "
            "/ ZeRO-1 with plain accumulation at 4."
        ),
        table(heads, rows),
        *_changes(document),
        _limits(document),
    ]


def _speedups(
    document: dict[str, Any], model: str, num_nodes: int, link: float, change: str = AS_IT_IS
) -> list[str]:
    """Return the speedups of PyAO, checkpointing and ZeRO-1 at a point of the grid."""
    at = (num_nodes, link, change)
    found = {
        row["system"]: f"{row['value']:.2f}"
        for row in select(document["rows"], model=model)
        if tuple(row["detail"][key] for key in ("nodes", "gbit_per_s", "change")) == at
    }
    return [found[system.name] for system in (PYAO, CHECKPOINTING, ACCUMULATION)]


def _changes(document: dict[str, Any]) -> list[str]:
    model, links = "OPT-1.3B", (1.0, 10.0)
    rows = [
        [change, *(cell for link in links for cell in _speedups(document, model, 5, link, change))]
        for change in CHANGES
    ]
    names = ("PyAO", "checkpointing", "ZeRO-1")
    return [
        paragraph(
            f"The same for {model} on five nodes that are not equal, or share their host's memory "
            "(each over ZeRO-2 at micro-batch 4 under the same circumstances):"
        ),
        table(["", *(f"{name}, {link:g} Gbit/s" for link in links for name in names)], rows),
    ]


def _limits(document: dict[str, Any]) -> str:
    slow, *_ = _speedups(document, "OPT-1.3B", 5, 100.0)
    return bullets(
        [
            "A larger micro-batch gains at most the ratio of the micro-batches, 2.5 here, and "
            f"only over slow links: at 100 Gbit/s PyAO comes to {slow} for OPT-1.3B "
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
    if document["mode"] != PREDICT:
        points = []
        for row in document["rows"]:
            points.append(("held-out points", row["system"], row["micro_batch"], row["value"]))
        return lines(points, "micro-batch", "s of a step")
    points = [
        (row["model"], row["system"], row["detail"]["gbit_per_s"], row["value"])
        for row in document["rows"]
        if row["detail"]["nodes"] == 5 and row["detail"]["change"] == AS_IT_IS
    ]
    figure = lines(points, "link, Gbit/s", "times as fast as ZeRO-2 at micro-batch 4")
    for axes in figure.axes:
        axes.set_xscale("log")
    return figure
