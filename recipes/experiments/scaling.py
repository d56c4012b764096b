"""The communication model over nodes, links and models, and its check against the miniature."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from experiments.calibration import HeldOut, Point, calibrate, check, errors_of
from experiments.communication import Cluster, Work, find_engine, time_of_accumulated
from experiments.experiment import Options, progress
from experiments.miniature_cluster import points_of, read_sweeps
from experiments.predictor import ASSUMPTIONS, Predictor
from experiments.rows import Result, Row
from experiments.systems import ACCUMULATION, BASELINE, CHECKPOINTING, PYAO, System
from experiments.time_to_target import OPTIMIZER_NS

SIZES = {"OPT-125M": "125m", "OPT-1.3B": "1.3b", "OPT-6.7B": "6.7b"}
NODES = (2, 5, 10, 100, 1000)
LINKS_GBIT_PER_S = (1.0, 2.5, 10.0, 25.0, 100.0)
SMALL, LARGE = 4, 10
"""Micro-batches that are compared: the paper's for OPT."""
SAMPLES = 40
"""Of each node in an optimizer step: ten small micro-batches, or four large ones."""
LATENCY_US = 50.0
BUCKET_BYTES = 1e9

WAYS = (
    (BASELINE, SMALL),
    (PYAO, LARGE),
    (CHECKPOINTING, LARGE),
    (ACCUMULATION, SMALL),
)
DDP = "DDP, accumulation"

AS_IT_IS = "as it is"
CHANGES: dict[str, dict[str, float]] = {
    AS_IT_IS: {},
    "one link at half speed": {"slowest_link": 0.5},
    "one device at half speed": {"slowest_device": 0.5},
    "compute varies by 10 %": {"jitter": 0.1},
    "host memory shared, 10 GB/s": {"host_gb_per_s": 10.0},
}
"""What may be different from equal nodes that wait for nothing."""


def predict_scaling(options: Options) -> Result:
    """Predict where a larger micro-batch pays, and by how much."""
    sizes = {"OPT micro": "micro"} if options.is_smoke else SIZES
    rows: list[Row] = []
    points = [(nodes, link, AS_IT_IS) for nodes in NODES for link in LINKS_GBIT_PER_S]
    points += [(5, link, change) for change in CHANGES for link in (1.0, 10.0) if CHANGES[change]]
    for name, size in progress(sizes.items(), "communication"):
        predictor = Predictor("opt", size)
        works = {(way.name, size): _work(predictor, way, size) for way, size in WAYS}
        for num_nodes, link, change in points:
            cluster = Cluster(
                num_nodes=num_nodes,
                link_gbit_per_s=link,
                latency_us=LATENCY_US,
                bucket_bytes=BUCKET_BYTES,
                **CHANGES[change],
            )
            rows += _speedups(name, predictor, works, cluster, change)
    return Result(
        rows=rows,
        assumptions=[
            *ASSUMPTIONS[:3],
            "an RTX 4070 in each node, whether or not the model fits into it; "
            f"{SAMPLES} samples of each node in an optimizer step; a message takes "
            f"{LATENCY_US:g} us, a ring N - 1 for "
            f"each pass and bucket of 1e9 bytes; AdamW {OPTIMIZER_NS:g} ns a parameter of a rank's "
            "share; no overlap; 94.1 % of the link is payload",
            "rings: no contention in switches, no trees, no lost packets. Beyond five nodes "
            "nothing was measured",
        ],
    )


def _work(predictor: Predictor, system: System, micro_batch: int) -> Work:
    predicted = predictor.predicted(system, micro_batch)
    return Work(
        gradient_bytes=predictor.gradient_bytes,
        compute_s=predicted.step_ms / 1e3,
        host_bytes=2 * predicted.offloaded_bytes + predictor.gradient_bytes,
    )


def _speedups(
    model: str,
    predictor: Predictor,
    works: dict[tuple[str, int], Work],
    cluster: Cluster,
    change: str,
) -> Iterator[Row]:
    optimizer_s = predictor.num_parameters / cluster.num_nodes * OPTIMIZER_NS / 1e9
    first: float | None = None
    ways = [(way.name, way.engine, size, way.name) for way, size in WAYS]
    ways.append((DDP, "ddp", SMALL, BASELINE.name))
    for name, engine, micro_batch, work_of in ways:
        work = dataclasses.replace(works[work_of, micro_batch], optimizer_s=optimizer_s)
        if name == DDP:  # every rank has the whole optimizer
            work = dataclasses.replace(work, optimizer_s=optimizer_s * cluster.num_nodes)
        seconds = time_of_accumulated(SAMPLES, micro_batch, find_engine(engine), cluster, work)
        first = first or seconds
        yield Row(
            model=model,
            system=name,
            micro_batch=micro_batch,
            quantity="speedup over ZeRO-2",
            unit="x",
            value=first / seconds,
            detail={
                "nodes": cluster.num_nodes,
                "gbit_per_s": cluster.link_gbit_per_s,
                "change": change,
                "step_s": seconds,
            },
        )


# ---- calibration ---------------------------------------------------------------------------------


FITTED_AT = (5, 0.05)
"""Nodes and Gbit/s of the cluster that is fitted, where other clusters are held out."""

SPLITS = {
    "other clusters": "fitted: steps with the links unshaped, and at five nodes and 50 Mbit/s "
    "those with the smallest and the largest micro-batch of each model; held out: the "
    "micro-batches between, all accumulated steps, and all steps at other rates and with other "
    "numbers of nodes",
    "micro-batches between": "fitted: steps with the links unshaped, and of each cluster and model "
    "those with the smallest and the largest micro-batch; held out: the micro-batches between, and "
    "all accumulated steps",
}
"""What is held out, by rules that look at no time. Rows are of the first."""


def split(
    points: list[tuple[Point, bool]], how: str = "other clusters"
) -> tuple[list[Point], list[Point]]:
    """Return what is fitted and what is held out.

    Args:
        points: of all sweeps, each with whether its link was shaped.
        how: a key of :data:`SPLITS`.
    """
    fitted: list[Point] = []
    held: list[Point] = []
    for point, is_shaped in points:
        sizes = [
            other.micro_batch
            for other, _ in points
            if (other.name, other.workload) == (point.name, point.workload)
        ]
        is_end = point.gas == 1 and point.micro_batch in (min(sizes), max(sizes))
        is_there = how != "other clusters" or (point.num_nodes, point.link_gbit_per_s) == FITTED_AT
        (fitted if not is_shaped or (is_end and is_there) else held).append(point)
    return fitted, held


def _errors(found: list[HeldOut]) -> dict[str, dict[str, Any]]:
    errors = {
        name: dataclasses.asdict(errors_of(found, is_link_bound=is_bound))
        for name, is_bound in (("link_bound", True), ("others", False))
    }
    return {
        name: {key: None if _is_nan(value) else value for key, value in each.items()}
        for name, each in errors.items()
    }


def miniature_scaling(options: Options) -> Result:
    """Calibrate the model on what the local cluster measured; check it at held-out points."""
    points = list(points_of(read_sweeps(options.sweeps)))
    calibrations, checked = {}, {}
    for how in SPLITS:
        fitted, held = split(points, how)
        calibrations[how] = calibrate(fitted)
        checked[how] = check(calibrations[how], held)
    found = checked["other clusters"]
    rows = [
        Row(
            model=each.point.workload.partition(",")[0],
            system=f"{each.point.engine}, {each.point.num_nodes} nodes, "
            f"{each.point.link_gbit_per_s * 1e3:g} Mbit/s"
            + (f", {each.point.gas} micro-steps" if each.point.gas > 1 else ""),
            micro_batch=each.point.micro_batch,
            quantity="step",
            unit="s",
            value=each.point.step_s,
            detail={
                "predicted_s": each.predicted_s,
                "error": each.error,
                "communication_share": each.communication_share,
            },
        )
        for each in found
    ]
    return Result(
        rows=rows,
        assumptions=[f"{how}: {rule}" for how, rule in SPLITS.items()],
        content={
            "calibration": {how: dataclasses.asdict(each) for how, each in calibrations.items()},
            "errors": {how: _errors(each) for how, each in checked.items()},
        },
    )


def _is_nan(value: float) -> bool:
    return isinstance(value, float) and math.isnan(value)
