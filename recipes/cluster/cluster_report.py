"""A sweep for a reader: a table in plain text, and progress while it runs."""

from __future__ import annotations

import sys
from collections import defaultdict
from statistics import fmean, median
from typing import Any

from tqdm import tqdm

from cluster.cluster_result import ClusterPoint, ClusterSetup, ClusterSweep
from cluster.cluster_settings import PointPlan
from cluster.cluster_volume import link_seconds

MEGA = 1e6
_WIDTHS = (8, 7, 8, 9, 10, 9, 12, 12, 11)
_HEADINGS = (
    ("", "micro-", "", "s per", "s to", "", "MB sent per step", "", "s per step"),
    ("model", "batch", "rounds", "step", "target", "speedup", "measured", "expected", "predicted"),
)


class Progress:
    """Shows each step of the first node as it ends; where no bar can be drawn, each point."""

    def __init__(self, points: list[PointPlan], compute_steps: int) -> None:
        extra = len(points) * (compute_steps + 1) if compute_steps else 0
        self._points = points
        self._total = sum(point.steps for point in points) + extra
        self._bar: Any = tqdm(
            total=self._total, unit="step", disable=not sys.stderr.isatty(), desc="starting"
        )

    def take(self, event: dict[str, Any]) -> None:
        """Show an event."""
        if event.get("node", 0) != 0:
            return
        if event["event"] == "point":
            plan = self._points[event["point"]]
            phase = "" if event["is_shaped"] else ", links unshaped"
            text = f"{plan.architecture}, micro-batch {plan.micro_batch}, run {plan.run}{phase}"
            self._bar.set_description_str(text)
            if self._bar.disable:
                print(text, file=sys.stderr, flush=True)
        elif event["event"] == "step":
            self._bar.update()
        elif event["event"] == "end":
            self.close()

    def close(self) -> None:
        """Leave the terminal in order."""
        self._bar.close()


def describe(setup: ClusterSetup) -> str:
    """Say in two lines what was run."""
    offload = "hf_pyao attached" if setup.activation_offload else "without hf_pyao"
    over = "over all nodes" if setup.target_over == "all" else "on each node"
    return (
        f"{setup.nodes} nodes at {setup.rate_mbit:g} Mbit/s: {setup.engine} in "
        f"{setup.precision}, gloo, {offload}\n"
        f"target: {setup.target} accumulated samples {over}; {setup.model_size} models, "
        f"{setup.block_size} tokens in a sample"
    )


def predicted_step_s(setup: ClusterSetup, point: ClusterPoint) -> float | None:
    """Return compute as measured unshaped and the expected bytes over the link; None without."""
    if point.compute_s is None:
        return None
    return point.compute_s + link_seconds(point.expected_bytes_per_step, setup.rate_mbit)


def by_micro_batch(sweep: ClusterSweep) -> dict[tuple[str, int, int], list[ClusterPoint]]:
    """Return the runs of each architecture, micro-batch and accumulation."""
    runs: defaultdict[tuple[str, int, int], list[ClusterPoint]] = defaultdict(list)
    for point in sweep.points:
        key = (point.architecture, point.micro_batch, point.gradient_accumulation)
        runs[key].append(point)
    return dict(runs)


def format_sweep(sweep: ClusterSweep) -> str:
    """Return the table: medians over the runs."""
    lines = ["", describe(sweep.setup), "-" * sum(_WIDTHS)]
    lines += [_row(heading) for heading in _HEADINGS]
    first_s: dict[str, float] = {}
    for (architecture, micro_batch, _), runs in by_micro_batch(sweep).items():
        target_s = _median([run.target_s for run in runs])
        if target_s is not None:
            first_s.setdefault(architecture, target_s)
        predicted_s = _median([predicted_step_s(sweep.setup, run) for run in runs])
        cells = (
            architecture,
            str(micro_batch),
            str(runs[0].rounds),
            f"{median(run.steady_step_s for run in runs):.3f}",
            "-" if target_s is None else f"{target_s:.2f}",
            "-" if target_s is None else f"{first_s[architecture] / target_s:.2f}",
            f"{median(fmean(run.tx_bytes_per_step) for run in runs) / MEGA:.3f}",
            f"{runs[0].expected_bytes_per_step / MEGA:.3f}",
            "-" if predicted_s is None else f"{predicted_s:.3f}",
        )
        lines.append(_row(cells))
    lines += ["-" * sum(_WIDTHS), *_notes(sweep)]
    return "\n".join(lines)


def _notes(sweep: ClusterSweep) -> list[str]:
    runs = 1 + max(point.run for point in sweep.points)
    accumulated = sweep.points[0].gradient_accumulation
    return [
        f"median of {runs} run{'s' if runs > 1 else ''}; {accumulated} micro-step"
        f"{'s' if accumulated > 1 else ''} in a round, which is an optimizer step",
        "s per step leaves the first step out, s to target has it in; sent: mean of the nodes",
        "predicted: the expected bytes over the link, and the step measured with links unshaped",
        "but for its collectives, which were measured alone",
        "a miniature on one machine: how large a micro-batch a device holds is no part of it",
    ]


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _row(cells: tuple[str, ...]) -> str:
    first, *others = zip(cells, _WIDTHS, strict=True)
    return f"{first[0]:<{first[1]}}" + "".join(f"{cell:>{width}}" for cell, width in others)
