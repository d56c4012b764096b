"""What the planner is to reach, for ``judge_plans.py``."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.plan.predict.predict import operation_times_ms, predict
from hf_pyao.plan.solve.optimal import bound_ms, solve
from hf_pyao.plan.solve.plan_problem import LayerGroup, PlanProblem, RebuildStep, SlotChoice, Way
from hf_pyao.plan.solve.planner import KEEP_ALL, OFFLOAD_ALL
from hf_pyao.tools.estimate.recorded_step import record_step
from studies.judged_steps import (
    MIN_BYTES,
    WINDOW_BYTES,
    by_engine,
    link_of,
    planner_of,
    replayed,
    training_of,
)

GRADIENT_MB = {"opt": 100.7, "gpt2": 39.3, "llama": 121.6}
"""Of one layer, in half precision."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A figure that the planner is to reach."""

    model: str
    what: str
    unit: str
    aim: float
    """At most, or at least where *is_least*."""
    value: float
    is_least: bool = False
    note: str = ""

    @property
    def is_met(self) -> bool:
        """Whether it does."""
        return self.value >= self.aim if self.is_least else self.value <= self.aim


EVICTED = {"opt": 3.0, "gpt2": 8.0, "llama": 3.0}
EVICTED_ONE_ENGINE = {"opt": 3.0, "gpt2": 10.0, "llama": 5.0}
H200_KEPT = {"opt": 45.0, "gpt2": 55.0, "llama": 35.0}
FASTER = {"opt": 1.22, "gpt2": 1.18, "llama": 1.18}
H200_OVERHEAD = 5.0


def targets(models: Sequence[str]) -> Iterator[Target]:
    """Yield what the planner is to reach for each model."""
    for model in tqdm(models, unit="model", desc="targets", leave=False):
        yield _evicted(model)
        yield _evicted_one_engine(model)
        yield _kept_on_h200(model)
        yield _against_checkpointing(model)


def _evicted(model: str) -> Target:
    planner = planner_of(model, 4, 512, "rtx4070", link_of("rtx4070", 25.0, 2), is_measured=True)
    chosen = planner.proposal(0)
    assert chosen is not None
    judged = by_engine(planner, chosen, model, 4, 512, "rtx4070")
    return Target(
        model=model,
        what="step overhead, everything evicted, RTX 4070, 25 GB/s",
        unit="%",
        aim=EVICTED[model],
        value=100 * (judged.step_ms / planner.simple()[KEEP_ALL].step_ms - 1),
    )


def _evicted_one_engine(model: str) -> Target:
    link = link_of("rtx4070", 25.0, 1)
    gradient_bytes = int(GRADIENT_MB[model] * 1e6)
    planner = planner_of(model, 4, 512, "rtx4070", link, gradient_bytes, is_measured=True)
    chosen = planner.proposal(0)
    assert chosen is not None
    judged = by_engine(planner, chosen, model, 4, 512, "rtx4070", gradient_bytes)
    kept_ms = planner.simple()[KEEP_ALL].step_ms
    everything = replayed(planner.simple()[OFFLOAD_ALL], link, gradient_bytes).step_ms
    return Target(
        model=model,
        what="the same with one copy engine, and gradients on it",
        unit="%",
        aim=EVICTED_ONE_ENGINE[model],
        value=100 * (judged.step_ms / kept_ms - 1),
        note=f"offloading everything: {100 * (everything / kept_ms - 1):.1f} %",
    )


def _kept_on_h200(model: str) -> Target:
    planner = planner_of(model, 16, 512, "h200", link_of("h200", 50.0, 2), is_measured=True)
    kept_ms = planner.simple()[KEEP_ALL].step_ms
    total = planner.total_bytes(planner.conditions)
    best: float = 100.0
    for budget in range(33):
        found = planner.proposal(budget)
        if found is not None and found.step_ms <= kept_ms * (1 + H200_OVERHEAD / 100):
            slots = zip(planner.program.slots, found.actions, strict=True)
            last = planner.program.num_layers - planner.conditions.keep_last_layers
            kept = sum(
                slot.nbytes
                for slot, action in slots
                if action == "keep"
                and slot.layer < last
                and slot.stays is None
                and slot.nbytes >= MIN_BYTES
            )
            judged = by_engine(planner, found, model, 16, 512, "h200")
            if judged.step_ms <= kept_ms * (1 + H200_OVERHEAD / 100):
                best = 100 * kept / total
                break
    return Target(
        model=model,
        what="bytes kept at 5 % overhead, H200, 50 GB/s, micro-batch 16",
        unit="%",
        aim=H200_KEPT[model],
        value=best,
    )


def _against_checkpointing(model: str) -> Target:
    """Compare with torch's own checkpointing, at no more than its peak."""
    link = link_of("rtx4070", 25.0, 2)
    planner = planner_of(model, 4, 512, "rtx4070", link, is_measured=True)
    training = dataclasses.replace(training_of(model), checkpointing=True)
    program = record_step(training, 4, 512)
    times_ms = operation_times_ms(program, find_hardware("rtx4070").device)
    plain = predict(
        program,
        [False] * len(program.slots),
        window_bytes=WINDOW_BYTES,
        times_ms=times_ms,
        link=link,
    )
    least = planner.least()
    chosen = planner.best(max(plain.peak_bytes, least.peak_bytes))
    judged = by_engine(planner, chosen, model, 4, 512, "rtx4070")
    kept_ms = planner.simple()[KEEP_ALL].step_ms
    return Target(
        model=model,
        what="times faster than torch's checkpointing at its peak, RTX 4070",
        unit="x",
        aim=FASTER[model],
        value=plain.step_ms / judged.step_ms,
        is_least=True,
        note=(
            f"checkpointing costs {100 * (plain.step_ms / kept_ms - 1):.1f} % here, so that "
            f"{plain.step_ms / kept_ms:.3f} is the most; peaks "
            f"{judged.peak_bytes / 1e9:.3f} and {plain.peak_bytes / 1e9:.3f} GB"
        ),
    )


@dataclass(frozen=True, kw_only=True)
class SolverTime:
    """The integer program of a large model."""

    num_layers: int
    num_slots: int
    elapsed_s: float
    """Median of five."""
    above_bound: float
    """Of the step's time, over the bound with fractions of layers."""


def large_problem(num_layers: int = 80, num_slots: int = 40) -> PlanProblem:
    """Return a problem of many layers and slots, drawn at random."""
    rng = random.Random(1)
    steps, slots = [], []
    for number in range(num_slots):
        nbytes = rng.randint(2**20, 2**26)
        steps.append(
            RebuildStep(
                elapsed_ms=nbytes * rng.choice((1e-9, 1e-8, 5e-8)),
                needs=(number - 1,) if number % 3 else (),
                path=f"m{number % 7}",
                is_product=number % 5 == 0,
            )
        )
        way = Way(codec=None, offload_ms=nbytes / 25e6, reload_ms=nbytes / 25e6, host_bytes=nbytes)
        slots.append(SlotChoice(name=f"s:{number}", nbytes=nbytes, ways=(way,), maker=number))
    total = num_layers * sum(slot.nbytes for slot in slots)
    group = LayerGroup(layers=tuple(range(num_layers)), slots=tuple(slots), steps=tuple(steps))
    return PlanProblem(
        groups=(group,),
        forward_ms=total / 25e6 * 0.4,
        backward_ms=total / 25e6 * 0.8,
        copy_engines=1,
        kept_bytes=total * 0.2,
    )


def solver_time(num_layers: int = 80, num_slots: int = 40) -> SolverTime:
    """Solve a problem of many layers and slots, drawn at random."""
    problem = large_problem(num_layers, num_slots)
    solve(problem)  # scipy is imported
    elapsed = []
    for _ in range(5):
        start = time.perf_counter()
        found = solve(problem)
        elapsed.append(time.perf_counter() - start)
    plain_ms = problem.forward_ms + problem.backward_ms
    return SolverTime(
        num_layers=num_layers,
        num_slots=num_slots,
        elapsed_s=statistics.median(elapsed),
        above_bound=(plain_ms + found.overhead_ms) / (plain_ms + bound_ms(problem)) - 1,
    )
