"""What the planner is to reach, for ``judge_plans.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from hf_pyao.plan.documents.plan import KEEP
from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.plan.predict.predict import operation_times_ms, predict
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
NUM_LIMITS = 32
"""Between the least memory and the most, at which a plan is looked for."""


def targets(models: Sequence[str]) -> Iterator[Target]:
    """Yield what the planner is to reach for each model."""
    for model in tqdm(models, unit="model", desc="targets", leave=False):
        yield _evicted(model)
        yield _evicted_one_engine(model)
        yield _kept_on_h200(model)
        yield _against_checkpointing(model)


def _evicted(model: str) -> Target:
    planner = planner_of(model, 4, 512, "rtx4070", link_of("rtx4070", 25.0, 2), is_measured=True)
    chosen = planner.best(planner.simple()[OFFLOAD_ALL].peak_bytes)
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
    chosen = planner.best(planner.simple()[OFFLOAD_ALL].peak_bytes)
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
    least_bytes = planner.least().peak_bytes
    step_bytes = (planner.kept.peak_bytes - least_bytes) / NUM_LIMITS
    last = planner.num_open_layers
    decided = [
        number
        for number, slot in enumerate(planner.program.slots)
        if slot.layer < last and slot.stays is None and slot.nbytes >= MIN_BYTES
    ]
    nbytes = {number: planner.program.slots[number].nbytes for number in decided}
    best = 100.0
    for number in range(NUM_LIMITS):
        found = planner.best(least_bytes + number * step_bytes)
        if found.step_ms <= kept_ms * (1 + H200_OVERHEAD / 100):
            kept = sum(nbytes[number] for number in decided if found.actions[number] == KEEP)
            judged = by_engine(planner, found, model, 16, 512, "h200")
            if judged.step_ms <= kept_ms * (1 + H200_OVERHEAD / 100):
                best = 100 * kept / sum(nbytes.values())
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
