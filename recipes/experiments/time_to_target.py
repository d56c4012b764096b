"""PyAO Figure 6: the time until 256 micro-batches are accumulated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments import published
from experiments.communication import COUNTINGS, Cluster, Work, find_engine, num_rounds, time_to
from experiments.experiment import Options
from experiments.miniature_cluster import read_sweeps, speedups_of
from experiments.predictor import (
    ASSUMPTIONS,
    PAPER_CAP_BYTES,
    SHADER_TFLOP_PER_S,
    Predictor,
    predictors,
)
from experiments.rows import Result, Row
from experiments.systems import (
    ACCUMULATION,
    AUTO,
    AUTO_CHUNKED,
    BASELINE,
    CHECKPOINTING,
    CHECKPOINTING_CHUNKED,
    MODELS,
    PYAO,
    PYAO_CHUNKED,
    PYAO_INT8,
    System,
)

SPEEDUP, SECONDS = "speedup over ZeRO-2", "time to 256"
SLOW = "40 % of the shaders"
OPTIMIZER_NS = 1.0
"""AdamW on the host, nanoseconds a parameter of the rank's share: an assumption."""

SPEEDS = {
    "tensor cores": None,
    "shaders": SHADER_TFLOP_PER_S,
    SLOW: 0.4 * SHADER_TFLOP_PER_S,
}
"""Assumptions on the card's arithmetic; None: the preset's."""
ASSUMED = (
    *ASSUMPTIONS,
    f"five nodes over 1 Gbit/s of which payload gets 94.1 %, no overlap with backward; gradients "
    f"in half precision; AdamW {OPTIMIZER_NS:g} ns a parameter of a rank's share",
    "micro-batches are the paper's (section 6.2) for ZeRO-2, PyAO, checkpointing and auto, and the "
    "largest of which 8.68 GB of tensors fit for the others, 256 over five nodes at most; auto "
    "plans for 8.68 GB of tensors",
)


def predict_times(options: Options) -> Result:
    """Predict each model and system, by each way to count."""
    rows: list[Row] = []
    for model, predictor in predictors(options, "Figure 6"):
        for speed, tflop_per_s in SPEEDS.items():
            if tflop_per_s is None:
                rows += _rows(model, speed, predictor, options.is_smoke)
            elif not options.is_smoke:
                rows += _rows(model, speed, predictor.at(tflop_per_s), False)
    return Result(rows=rows, assumptions=ASSUMED)


def _sizes(model: str, predictor: Predictor, is_smoke: bool) -> Iterator[tuple[System, int]]:
    """Yield each system with the micro-batch that it runs; a smoke run looks for none."""
    small, large = published.MICRO_BATCHES[model]
    most = -(-published.TARGET // published.NUM_NODES)  # more is not needed to reach the target
    yield BASELINE, small
    for system in (PYAO, PYAO_INT8, CHECKPOINTING, AUTO):
        yield system, large
    for system in (PYAO_CHUNKED, CHECKPOINTING_CHUNKED, AUTO_CHUNKED, ACCUMULATION):
        yield system, 2 if is_smoke else min(most, max(1, predictor.largest(system)))


def _rows(model: str, speed: str, predictor: Predictor, is_smoke: bool) -> Iterator[Row]:
    cluster = Cluster(num_nodes=published.NUM_NODES, link_gbit_per_s=published.LINK_GBIT_PER_S)
    share = predictor.num_parameters / published.NUM_NODES
    baseline: dict[str, float] = {}
    for system, micro_batch in _sizes(model, predictor, is_smoke):
        predicted = predictor.predicted(system, micro_batch, PAPER_CAP_BYTES)
        work = Work(
            gradient_bytes=predictor.gradient_bytes,
            compute_s=predicted.timed.step_ms / 1e3,
            optimizer_s=share * OPTIMIZER_NS / 1e9,
            host_bytes=2 * predicted.timed.offloaded_bytes,
        )
        engine = find_engine(system.engine)
        for counting in COUNTINGS:
            time_s = time_to(published.TARGET, micro_batch, engine, cluster, work, counting)
            baseline.setdefault(counting.name, time_s)
            rounds = num_rounds(published.TARGET, micro_batch, cluster.num_nodes, counting)
            common: dict[str, Any] = {
                "model": MODELS[model],
                "system": system.name,
                "micro_batch": micro_batch,
                "detail": {
                    "speed": speed,
                    "counting": counting.name,
                    "engine": system.engine,
                    "compute_ms": work.compute_s * 1e3,
                    "optimizer_s": work.optimizer_s,
                    "rounds": rounds,
                },
            }
            yield Row(**common, quantity=SECONDS, unit="s", value=time_s)
            yield Row(
                **common,
                quantity=SPEEDUP,
                unit="x",
                value=baseline[counting.name] / time_s,
                published=published.SPEEDUPS[model] if system is PYAO_INT8 else None,
            )


def miniature_times(options: Options) -> Result:
    """Read what the local cluster measured."""
    sweeps = read_sweeps(options.sweeps)
    return Result(
        rows=[row for name, sweep in sweeps.items() for row in speedups_of(name, sweep)],
        assumptions=[
            "models, link and target are a miniature's: only ratios can be put beside the paper's",
            "micro-batches are given, not found: no memory limit is in a miniature",
        ],
        content={"sweeps": list(sweeps)},
    )
