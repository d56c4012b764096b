"""Judge the planner on steps that FSDP2 or ZeRO-3 shards: with collectives, against simpler ways.

    python recipes/studies/judge_sharded_plans.py --result recipes/results/judged_sharded_plans.json
    python recipes/studies/judge_sharded_plans.py --model opt --engine zero3
    python recipes/studies/judge_sharded_plans.py --smoke       two points of each engine

Each step is one of eight ranks', in bfloat16: under FSDP2 each layer is a unit, and ZeRO-3 gathers
beside compute (overlap_comm). It is recorded on fake tensors, with all-gathers and reductions. The
chosen plan is held
against keeping everything, checkpointing, offloading layer inputs, offloading everything, and
either of the first layers alone, where those fit. Interconnects are as fast as NVLink's, and so
slow that compute waits for collectives most of the time. Times come from a replay, whose clock
reckons copies and collectives by itself; nothing is measured on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.plan.hardware.speeds import GIB
from hf_pyao.plan.predict.predict import operation_times_ms
from hf_pyao.plan.solve.conditions import Conditions
from hf_pyao.plan.solve.planner import (
    CHECKPOINT,
    KEEP_ALL,
    LAYER_INPUTS,
    OFFLOAD_ALL,
    Candidate,
    NoPlanFitsError,
    Planner,
)
from hf_pyao.plan.solve.steering import MEASURED
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.model_sizes import build_config, find_size

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the simulation, which is tests'

from result_file import write_result
from studies import sharded_steps
from studies.judged_steps import SIZES, WINDOW_BYTES, link_of, replayed
from studies.sharded_steps import ENGINES, NUM_RANKS

SCHEMA_VERSION = 2
SEQUENCE_LENGTH = 512
MICRO_BATCH = 4
CARDS = {"rtx4070": (12.5, (4.0, 12.0)), "h200": (50.0, (40.0, 400.0))}
"""Card -> speed of its link to the host, and of interconnects between devices, GB/s."""
SHARES = (0.05, 0.2, 0.4, 0.7)
"""Where between the least and the most memory the limit is."""
SIMPLE = (KEEP_ALL, CHECKPOINT, LAYER_INPUTS, OFFLOAD_ALL)


@dataclass(frozen=True, kw_only=True)
class ShardedPoint:
    """One step of a rank, within one limit."""

    engine: str
    model: str
    card: str
    link_gb_per_s: float
    collective_gb_per_s: float
    limit_bytes: float
    chosen: str
    chosen_ms: float
    """Replayed."""
    predicted_ms: float
    waits_for_collectives_ms: float
    peak_bytes: int
    best: str
    """Of the simpler ways that fit, the fastest."""
    best_ms: float
    kept_ms: float
    """Keeping everything, which may not fit."""

    @property
    def gap(self) -> float:
        """How much slower than the best simpler way that fits; below 0: faster."""
        return self.chosen_ms / self.best_ms - 1


@cache
def programs_of(engine: str, model: str, micro_batch: int, length: int) -> list[StepProgram]:
    """Return the recorded step of a rank; under ZeRO-3 also one whose layers run again."""
    config = build_config(model, find_size(model, SIZES[model]))
    return sharded_steps.programs_of(engine, config, micro_batch, length)


def points_of(
    engine: str,
    model: str,
    card: str,
    collective_gb_per_s: float,
    shares: Sequence[float] = SHARES,
    micro_batch: int = MICRO_BATCH,
    length: int = SEQUENCE_LENGTH,
) -> Iterator[ShardedPoint]:
    """Judge a step at several limits."""
    programs = programs_of(engine, model, micro_batch, length)
    for each in programs:
        assert sum(one.collective is not None for one in each.operations) > each.num_layers
    link_gb_per_s = CARDS[card][0]
    link = link_of(card, link_gb_per_s, find_hardware(card).link.copy_engines)
    device = dataclasses.replace(
        find_hardware(card).device, collective_gib_per_s=collective_gb_per_s * 1e9 / GIB
    )
    # As after measuring, which a run of several ranks always does.
    conditions = Conditions(link=link, window_bytes=WINDOW_BYTES, speed_ratios=MEASURED)
    planners = [Planner(each, operation_times_ms(each, device), conditions) for each in programs]
    simple: dict[str, Any] = {**planners[0].simple()}
    for planner in planners[1:]:
        again = planner.simple()
        simple |= {CHECKPOINT: again[KEEP_ALL], LAYER_INPUTS: again[OFFLOAD_ALL]}
    peaks = [each.peak_bytes for each in simple.values()]
    for share in shares:
        limit = min(peaks) + share * (max(peaks) - min(peaks))
        fitting = [each for each in (best_of(one, limit) for one in planners) if each is not None]
        chosen = min(fitting, key=lambda each: each.step_ms)
        rivals = {name: simple[name] for name in SIMPLE if simple[name].peak_bytes <= limit}
        for planner in planners:
            rivals |= {each.name: each for each in planner.first_layers_fitting(limit)}
        times = {name: replayed(each, link).step_ms for name, each in rivals.items()}
        best = min(times, key=lambda name: times[name])
        timed = chosen.timed
        yield ShardedPoint(
            engine=engine,
            model=model,
            card=card,
            link_gb_per_s=link_gb_per_s,
            collective_gb_per_s=collective_gb_per_s,
            limit_bytes=limit,
            chosen=chosen.name,
            chosen_ms=replayed(chosen, link).step_ms,
            predicted_ms=chosen.step_ms,
            waits_for_collectives_ms=timed.collective_forward_ms + timed.collective_backward_ms,
            peak_bytes=chosen.peak_bytes,
            best=best,
            best_ms=times[best],
            kept_ms=simple[KEEP_ALL].step_ms,
        )


def best_of(planner: Planner, limit_bytes: float) -> Candidate | None:
    """Return the fastest plan; None if none fits."""
    try:
        return planner.best(limit_bytes)
    except NoPlanFitsError:
        return None


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SIZES, action="append", help="(default: all three)")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="(default: both)")
    parser.add_argument("--smoke", action="store_true", help="two points, to see that it runs")
    parser.add_argument("--result", type=Path, metavar="FILE.json", help="write the figures")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    engines = args.engine or ENGINES
    cells = [
        (engine, model, card, speed)
        for engine, model, card in itertools.product(engines, args.model or SIZES, CARDS)
        for speed in CARDS[card][1]
    ]
    points: list[ShardedPoint] = []
    if args.smoke:
        for engine in engines:
            points += points_of(engine, "opt", "rtx4070", 12.0, SHARES[::2], 1, 64)
    else:
        for cell in tqdm(cells, unit="step", leave=False):
            points += points_of(*cell)
    show(points)
    if args.result is not None:
        write_result(
            args.result,
            kind="judged_sharded_plans",
            schema_version=SCHEMA_VERSION,
            num_ranks=NUM_RANKS,
            micro_batch=MICRO_BATCH,
            sequence_length=SEQUENCE_LENGTH,
            points=points,
        )


def show(points: Sequence[ShardedPoint]) -> None:
    """Print each point, and what they come to."""
    for point in sorted(points, key=lambda each: -each.gap):
        print(
            f"{point.engine}, {point.model}, {point.card}, link {point.link_gb_per_s:g} GB/s, "
            f"interconnect {point.collective_gb_per_s:g} GB/s, {point.limit_bytes / GIB:.2f} GiB: "
            f"{point.chosen_ms:.1f} ms ({point.waits_for_collectives_ms:.1f} of waiting for "
            f"collectives), {100 * point.gap:+.2f} % against {point.best!r}"
        )
    gaps = [point.gap for point in points]
    print(
        f"{len(points)} points: {100 * statistics.median(gaps):+.1f} % in the median, "
        f"{100 * min(gaps):+.1f} % at best and {100 * max(gaps):+.2f} % at worst."
    )


if __name__ == "__main__":
    main()
