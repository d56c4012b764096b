"""The communication model over nodes, links and models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from experiments.communication import Cluster, Work, find_engine, time_of_accumulated
from experiments.experiment import Options, progress
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
        compute_s=predicted.timed.step_ms / 1e3,
        host_bytes=2 * predicted.timed.offloaded_bytes + predictor.gradient_bytes,
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
