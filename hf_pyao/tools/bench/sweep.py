"""A sweep over budgets on the machine as it is: each point in a process of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hf_pyao.plan.documents.bench import BenchRow
from hf_pyao.plan.documents.provenance import Provenance, collect_provenance
from hf_pyao.plan.documents.schema import to_plain, write_json
from hf_pyao.plan.documents.sweep import TENSORS, SweepPoint, SweepReport
from hf_pyao.plan.paper.sweep import Budgets, order_of, with_points
from hf_pyao.tools.bench.harness import describe_machine
from hf_pyao.tools.bench.methods import CUSTOM_PREFIX, OVER_CHECKPOINT, find_method
from hf_pyao.tools.bench.processes import probe, run_trials
from hf_pyao.tools.bench.setup import BenchSetup, Trial

ON_DEVICE = "peak of allocated device memory over the timed steps"
ON_A_CPU = "bytes that autograd holds in the layers after forward; there was no device"

Progress = Callable[[SweepPoint], None]
"""Told of each point that is done."""


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What is measured."""

    setup: BenchSetup
    """What all points have in common; its seed is the first."""
    budgets: Budgets
    micro_batch: int
    num_seeds: int
    settings: tuple[tuple[str, str], ...] = ()
    """Further fields of ``PyAOConfig``, as ``pyao:`` methods take them."""
    with_checkpointing: bool = False
    order_seed: int = 0
    """Shuffles the order of the budgets."""

    @property
    def seeds(self) -> range:
        """The seeds, in order."""
        return range(self.setup.seed, self.setup.seed + self.num_seeds)

    @property
    def num_points(self) -> int:
        """Points to measure: of each seed all budgets, and 0 again."""
        return self.num_seeds * (len(self.budgets.values) + 1)

    def trial(self, budget: int) -> Trial:
        """Return what the harness measures for *budget*."""
        given = [("policy", "budget"), ("budget", str(self.budgets.setting(budget)))]
        settings = ",".join(f"{key}={value}" for key, value in (*given, *self.settings))
        prefix = OVER_CHECKPOINT if self.with_checkpointing else ""
        return Trial(
            method=f"{prefix}{CUSTOM_PREFIX}{settings}",
            micro_batch=self.micro_batch,
            times_packs=True,
        )


def run_sweep(
    plan: SweepPlan,
    *,
    output: Path | None = None,
    timeout_s: float = 600.0,
    on_machine: Callable[[str], None] = lambda line: None,
    on_point: Progress = lambda point: None,
) -> SweepReport:
    """Measure each budget with each seed, and return the report.

    An interrupt ends it early: the report then has the points that were done.

    Args:
        plan: what is measured.
        output: where the report is written, anew after each point; None: nowhere.
        timeout_s: most time for a point.
        on_machine: told of the machine once.
        on_point: told of each point.

    Raises:
        ConfigError: the device or the model cannot be had, or a setting is bad.
        ReportError: *output* cannot be written.
    """
    find_method(plan.trial(0).method)
    device, link, _ = probe(plan.setup.device, with_speeds=False)
    on_machine(describe_machine(device, link))
    report = _empty_report(plan, device, collect_provenance())
    points: list[SweepPoint] = []
    try:
        for seed in plan.seeds:
            for position, budget in enumerate(order_of(plan.budgets, seed, plan.order_seed)):
                setup = dataclasses.replace(plan.setup, seed=seed)
                trial = plan.trial(budget)
                (row,) = run_trials(setup, [trial], timeout_s=timeout_s)
                points.append(point_of(row, budget, seed, position))
                report = with_points(report, points)
                if output is not None:
                    write_json(output, report)
                on_point(points[-1])
    except KeyboardInterrupt:
        pass
    return report


def point_of(row: BenchRow, budget: int, seed: int, position: int) -> SweepPoint:
    """Return what the harness measured as a point of a sweep."""
    figures = row.metrics
    memory_bytes = row.peak_allocated_bytes
    if memory_bytes is None and "held_bytes" in figures:
        memory_bytes = int(figures["held_bytes"])
    stalls = [figures.get(f"stall_{phase}_ms") for phase in ("forward", "backward")]
    known = [stall for stall in stalls if stall is not None]
    return SweepPoint(
        budget=budget,
        seed=seed,
        position=position,
        status=row.status,
        reason=row.reason,
        memory_bytes=memory_bytes,
        host_bytes=row.rss_growth_bytes,
        offloaded_bytes=int(figures["offloaded_bytes"]) if "offloaded_bytes" in figures else None,
        step_ms=None if row.step is None else row.step.median_ms,
        tokens_per_s=row.tokens_per_s,
        pack_ms=figures.get("pack_ms"),
        stall_ms=sum(known) if known else None,
        loss=row.loss,
        gradient_digest=row.gradient_digest,
    )


def _empty_report(
    plan: SweepPlan, device: dict[str, object], provenance: Provenance
) -> SweepReport:
    what = "checkpointing, " if plan.with_checkpointing else ""
    kind = "tensors" if plan.budgets.are == TENSORS else "bytes"
    report = SweepReport(
        title=f"{plan.setup.describe(plan.micro_batch)}, {what}budgets in {kind}, "
        f"{plan.num_seeds} seed{'s' * (plan.num_seeds > 1)}",
        is_measured=True,
        budgets_are=plan.budgets.are,
        memory_is=ON_DEVICE if device.get("device") != "cpu" else ON_A_CPU,
        setup={
            **to_plain(plan.setup),
            "micro_batch": plan.micro_batch,
            "budgets": list(plan.budgets.values),
            "seeds": list(plan.seeds),
            "order_seed": plan.order_seed,
            "checkpointing": plan.with_checkpointing,
            "settings": dict(plan.settings),
        },
        device=device,
        assumptions=[],
        num_planned=plan.num_points,
        rows=[],
        points=[],
        drift=[],
        knee_reason="",
        provenance=provenance,
    )
    return with_points(report, [])
