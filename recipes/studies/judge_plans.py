"""Judge the planner: what it chooses, on hundreds of steps and links, against simpler ways.

    python recipes/studies/judge_plans.py                       half an hour on two cores
    python recipes/studies/judge_plans.py --points 40
    python recipes/studies/judge_plans.py --result recipes/results/judged_plans.json
    python recipes/studies/judge_plans.py --smoke               two models' points, in half a minute

Two tables, none of it measured on a GPU:

    grid      models x sequence lengths x micro-batches x links x copy engines, each at a limit
              between the least and the most memory: the chosen plan against keeping everything,
              checkpointing, offloading layer inputs, offloading everything, and checkpointing or
              offloading as few of the first layers as fit; where those fit. Also where link and
              compute are off by 30 % each: regret against these, of the plan from a data sheet and
              of those that are made for those speeds
    targets   at speeds that are measured: the paper's models with everything evicted, with
              gradients on the same link, on an H200 at a bounded overhead, and against torch's
              own checkpointing at its own peak

The grid's times come from a replay (`tests/helpers/simulation/replayed_step.py`): the predictor's
walk on the simulation's clock. Rows of the targets, and twelve points of the grid, are judged by
the engine itself on fake tensors: the plan is recorded, and replayed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from hf_pyao.plan.solve.planner import (
    CHECKPOINT,
    KEEP_ALL,
    LAYER_INPUTS,
    OFFLOAD_ALL,
    Candidate,
    Planner,
)
from hf_pyao.plan.solve.steering import MEASURED, PRESET

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the simulation, which is tests'

from result_file import write_result
from studies.judged_steps import SIZES, by_engine, choice_of, link_of, planner_of, replayed
from studies.judged_targets import Target, targets

SCHEMA_VERSION = 3
LENGTHS = (256, 512, 1024)
MICRO_BATCHES = (2, 4, 8)
CARDS = {"rtx4070": (6.25, 12.5, 25.0), "h200": (25.0, 50.0)}
"""Card -> speeds of its link, GB/s."""
SHARES = (0.05, 0.2, 0.4, 0.7)
"""Where between the least and the most memory the limit is: taken in turn."""
NUM_BY_ENGINE = 12
"""Points of the grid that the engine itself judges."""


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """One step, on one link, within one limit."""

    model: str
    sequence_length: int
    micro_batch: int
    card: str
    link_gb_per_s: float
    copy_engines: int
    limit_bytes: float
    chosen: str
    chosen_ms: float
    """Replayed."""
    predicted_ms: float
    peak_bytes: int
    best: str
    """Of the simpler ways that fit, the fastest."""
    best_ms: float
    kept_ms: float
    """Keeping everything, which may not fit."""
    by_engine_ms: float | None = None
    """Recorded with the engine, and replayed; None where that was not done."""
    by_engine_peak_bytes: int | None = None
    levers: str = ""
    """What of the step itself was chosen besides; empty: it is as configured."""
    as_configured_ms: float | None = None
    """Replayed: the best plan for the step as configured; None where segments were not looked at,
    or no such plan fits."""

    regret: float = 0.0
    """Where speeds are off by 30 %, at worst: time over the best simpler way's there, less 1."""
    regret_measured: float = 0.0
    """The same of the plan that is made for the speeds as given, as `auto` makes it when it has
    measured."""
    measured_ms: float = 0.0
    """Predicted for that plan."""

    @property
    def gap(self) -> float:
        """How much slower than the best simpler way that fits; below 0: faster."""
        return self.chosen_ms / self.best_ms - 1


def grid(models: Sequence[str], num_points: int | None) -> Iterator[GridPoint]:
    """Yield the points of the grid, spread over all of it if only some are wanted."""
    cells = [
        (model, length, micro_batch, card, speed, engines)
        for model, length, micro_batch in itertools.product(models, LENGTHS, MICRO_BATCHES)
        for card, speeds in CARDS.items()
        for speed in speeds
        for engines in (1, 2)
    ]
    # Some of all models: what is left out is spread evenly.
    step = 1 if num_points is None else max(1, len(cells) // num_points)
    wanted = cells[::step]
    every = max(1, len(wanted) // NUM_BY_ENGINE)
    for number, cell in enumerate(tqdm(wanted, unit="point", desc="grid", leave=False)):
        share = SHARES[number % len(SHARES)]
        yield grid_point(*cell, share=share, is_by_engine=number % every == 0)


def grid_point(
    model: str,
    length: int,
    micro_batch: int,
    card: str,
    gb_per_s: float,
    copy_engines: int,
    *,
    share: float,
    is_by_engine: bool = False,
) -> GridPoint:
    """Judge one point."""
    link = link_of(card, gb_per_s, copy_engines)
    planner = planner_of(model, micro_batch, length, card, link)
    simple = planner.simple()
    peaks = [each.peak_bytes for each in simple.values()]
    limit = min(peaks) + share * (max(peaks) - min(peaks))
    found = choice_of(planner, model, micro_batch, length, card).best(limit)
    configured = found.looked_at[0]
    assert configured.candidate is not None
    chosen, levers = found.candidate, found.levers.describe()
    is_by_engine = is_by_engine and not levers
    fitting = {
        name: replayed(simple[name], link).step_ms
        for name in (KEEP_ALL, CHECKPOINT, LAYER_INPUTS, OFFLOAD_ALL)
        if simple[name].peak_bytes <= limit
    }
    first = planner.first_layers_fitting(limit)
    fitting |= {each.name: replayed(each, link).step_ms for each in first}
    plain = [*(simple[name] for name in fitting if name in simple), *first]
    measured = for_one_speed(planner).best(limit)
    best = min(fitting, key=lambda name: fitting[name])
    engine = by_engine(planner, chosen, model, micro_batch, length, card) if is_by_engine else None
    return GridPoint(
        model=model,
        sequence_length=length,
        micro_batch=micro_batch,
        card=card,
        link_gb_per_s=gb_per_s,
        copy_engines=copy_engines,
        limit_bytes=limit,
        chosen=chosen.name,
        chosen_ms=replayed(chosen, link).step_ms,
        predicted_ms=chosen.step_ms,
        peak_bytes=chosen.peak_bytes,
        best=best,
        best_ms=fitting[best],
        kept_ms=simple[KEEP_ALL].step_ms,
        by_engine_ms=None if engine is None else engine.step_ms,
        by_engine_peak_bytes=None if engine is None else engine.peak_bytes,
        levers=levers,
        regret=worst_regret(chosen, plain),
        regret_measured=worst_regret(measured, plain),
        measured_ms=measured.step_ms,
        as_configured_ms=replayed(configured.candidate, link).step_ms if configured.fits else None,
    )


def for_one_speed(planner: Planner) -> Planner:
    """Return the planner of the same step where speeds are measured."""
    conditions = dataclasses.replace(planner.conditions, speed_ratios=MEASURED)
    return Planner(planner.program, planner.stepper.times_ms, conditions, stepper=planner.stepper)


def worst_regret(plan: Candidate, rivals: Sequence[Candidate]) -> float:
    """Return a plan's time over the fastest rival's, less 1, where link and compute are off."""
    return max(
        plan.outcome.step_ms_at(ratio) / min(each.outcome.step_ms_at(ratio) for each in rivals) - 1
        for ratio in PRESET
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SIZES, action="append", help="(default: all three)")
    parser.add_argument("--points", type=int, metavar="N", help="of the grid, about (default: all)")
    parser.add_argument("--targets", action="store_true", help="the second table alone")
    parser.add_argument("--smoke", action="store_true", help="a few points, to see that it runs")
    parser.add_argument("--result", type=Path, metavar="FILE.json", help="write the figures")
    args = parser.parse_args(argv)
    models = tuple(args.model or SIZES)
    if args.smoke:
        points = [
            grid_point("opt", 256, 2, "rtx4070", 12.5, 1, share=0.4, is_by_engine=True),
            grid_point("llama", 256, 2, "h200", 50.0, 2, share=0.4),
        ]
        show(points, [])
        return
    points = [] if args.targets else list(grid(models, args.points))
    reached = list(targets(models))
    show(points, reached)
    if args.result is not None:
        write_result(
            args.result,
            kind="judged_plans",
            schema_version=SCHEMA_VERSION,
            grid=points,
            targets=reached,
        )


def show(points: Sequence[GridPoint], reached: Sequence[Target]) -> None:
    """Print the tables."""
    if points:
        _show_grid(points)
    for target in reached:
        sign = ">=" if target.is_least else "<="
        met = "met" if target.is_met else "MISSED"
        print(
            f"{target.model}: {target.what}: {target.value:.3g} {target.unit} "
            f"(aim {sign} {target.aim:g}; {met}) {target.note}"
        )


def _show_grid(points: Sequence[GridPoint]) -> None:
    gaps = [point.gap for point in points]
    print(
        f"{len(points)} points: against the best simpler way that fits, the chosen plan is "
        f"{100 * statistics.median(gaps):+.1f} % in the median, {100 * min(gaps):+.1f} % at best "
        f"and {100 * max(gaps):+.2f} % at worst."
    )
    for what, regrets in (
        ("a plan from a data sheet", [point.regret for point in points]),
        ("a plan for the speeds as given", [point.regret_measured for point in points]),
    ):
        print(
            f"speeds off by 30 %: {what} against the best simpler way for them "
            f"{100 * statistics.median(regrets):+.1f} % in the median and "
            f"{100 * max(regrets):+.2f} % at worst; "
            f"{sum(regret <= 0.02 for regret in regrets)} points within 2 %."
        )
    changed = [point for point in points if point.levers]
    slower = [
        p.chosen_ms / p.as_configured_ms - 1 for p in points if p.as_configured_ms is not None
    ]
    print(
        f"levers: layers run again as a whole in {len(changed)} of them; against the best plan for "
        f"the step as configured {100 * max(slower, default=0.0):+.2f} % at worst."
    )
    print("worst points:")
    for point in sorted(points, key=lambda point: -point.gap)[:5]:
        print(
            f"  {point.model} {point.micro_batch} x {point.sequence_length}, {point.card}, "
            f"{point.link_gb_per_s:g} GB/s, {point.copy_engines} engine(s): "
            f"{100 * point.gap:+.2f} % against {point.best!r}"
        )
    judged = [point for point in points if point.by_engine_ms is not None]
    if judged:
        off = [abs(p.chosen_ms / p.by_engine_ms - 1) for p in judged if p.by_engine_ms]
        print(
            f"by the engine: {len(judged)} points, times differ by {100 * max(off):.3f} % at most"
        )


if __name__ == "__main__":
    main()
