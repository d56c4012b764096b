"""The harness: each method in a process of its own, one JSON that grows as rows come."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_pyao.plan.documents.bench import OK, REFERENCE, BenchReport, BenchRow
from hf_pyao.plan.documents.provenance import collect_provenance
from hf_pyao.plan.documents.schema import to_plain, write_json
from hf_pyao.tools.bench.methods import find_method, is_lossy
from hf_pyao.tools.bench.processes import probe, run_trials
from hf_pyao.tools.bench.setup import BenchSetup, Trial

Progress = Callable[[str], None]
"""Told what happens, a line at a time."""


def silent(line: str) -> None:
    """Tell nobody."""


def run_bench(
    setup: BenchSetup,
    trials: Sequence[Trial],
    *,
    output: Path | None = None,
    timeout_s: float = 600.0,
    progress: Progress = silent,
) -> BenchReport:
    """Measure each of *trials* in a process of its own and return the report.

    Args:
        setup: what they have in common.
        trials: one for each row, in this order.
        output: where the report is written, anew after each row; None: nowhere.
        timeout_s: most time for a row.
        progress: told of each row.

    Raises:
        ConfigError: a method is unknown, or the device or the model cannot be had.
        ReportError: *output* cannot be written.
    """
    for trial in trials:
        find_method(trial.method)
    device, link, _ = probe(setup.device, with_speeds=True)
    progress(describe_machine(device, link))
    report = BenchReport(
        title=title_of(setup, trials),
        setup=to_plain(setup),
        device=device,
        link=link,
        provenance=collect_provenance(),
        rows=[],
    )
    for number, trial in enumerate(trials, start=1):
        progress(f"[{number}/{len(trials)}] {trial.method} ...")
        rows = run_trials(setup, [trial], timeout_s=timeout_s)
        report = report.with_rows([*report.rows, *rows])
        if output is not None:
            write_json(output, report)
        done = report.rows[-1]
        progress(f"[{number}/{len(trials)}] {done.method}: {describe_row(done)}")
    return report


def title_of(setup: BenchSetup, trials: Sequence[Trial]) -> str:
    """Return the report's title."""
    sizes = {trial.micro_batch for trial in trials if not trial.is_search}
    return setup.describe(sizes.pop() if len(sizes) == 1 else None)


def describe_machine(device: dict[str, Any], link: dict[str, Any]) -> str:
    """Return one line on the device and its link."""
    speeds = [
        f"{name} {speed:.1f} GiB/s"
        for name, speed in (
            ("to host", link.get("d2h_gib_per_s")),
            ("to device", link.get("h2d_gib_per_s")),
            ("both", link.get("both_gib_per_s")),
        )
        if speed is not None
    ]
    return ", ".join([str(device["name"]), *speeds]) + ("" if speeds else ", no link to measure")


def describe_row(row: BenchRow) -> str:
    """Return one line on what a row came to."""
    parts = []
    if row.status != OK:
        parts.append(f"{row.status}: {row.reason}")
    if row.num_tried is not None and row.micro_batch:
        parts.append(f"largest micro-batch {row.micro_batch}")
    if row.step is not None:
        parts.append(f"{row.step.median_ms:.1f} ms a step")
    if row.peak_allocated_bytes is not None:
        parts.append(f"peak {row.peak_allocated_bytes / 2**30:.2f} GiB")
    elif row.rss_growth_bytes is not None:
        parts.append(f"host memory +{row.rss_growth_bytes / 2**30:.2f} GiB")
    if row.are_gradients_equal is not None and row.method != REFERENCE:
        parts.append("same gradients" if row.are_gradients_equal else _other_gradients(row))
    return ", ".join(parts)


def _other_gradients(row: BenchRow) -> str:
    return "OTHER GRADIENTS" + (" (lossy codec: expected)" if is_lossy(row.method) else "")


def smoke(setup: BenchSetup) -> BenchSetup:
    """Return *setup* in a size that a CPU measures in a moment: a trial of the program itself."""
    return dataclasses.replace(
        setup, sequence_length=16, dtype="float32", autocast=None, num_warmup=1, num_steps=2
    )
