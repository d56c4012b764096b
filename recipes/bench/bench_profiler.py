"""Measure what profiling costs while it runs, side by side with the same steps without it.

    python recipes/bench/bench_profiler.py
    python recipes/bench/bench_profiler.py --result recipes/results/profiler_cost.json
    python recipes/bench/bench_profiler.py --smoke

The same forward and backward of a small model run in turns: attached; attached, while the profiler
listens (``profile=``); attached, while PyAO's rule times it (policy ``pyao``). Processor time is
counted, so that other work on the machine matters less; ratios are medians over turns. When no one
listens, nothing of it is on the path of a saved tensor: `bench_hooks.py --against` compares that
with another checkout.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.offloader import Offloader
from hf_pyao.plan.measure.pack_intervals import PackIntervals
from hf_pyao.plan.measure.profile import StepProfiler
from hf_pyao.tools.estimate.model_sizes import build_config, find_size

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from result_file import write_result

SCHEMA_VERSION = 1
MOST_STEPS = 10**9
SIZE = "micro"
"""Small enough that what hooks cost is a large part of a step."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write the figures if asked to."""
    args = _parse(argv)
    torch.set_num_threads(1)
    rows = [measure(name, args.rounds) for name in args.model]
    print("| model | saved tensors | step, ms | profiler | per tensor | PyAO's rule | per tensor |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        print(
            f"| {row['model']} | {row['num_packs']} | {row['step_ms']:.1f} "
            f"| {row['profiler_ratio']:.3f} | {row['profiler_us_per_tensor']:.1f} us "
            f"| {row['rule_ratio']:.3f} | {row['rule_us_per_tensor']:.1f} us |"
        )
    if args.result is not None:
        write_result(args.result, kind="profiler_cost", schema_version=SCHEMA_VERSION, rows=rows)


def measure(architecture: str, num_rounds: int) -> dict[str, Any]:
    """Return what profiling costs a small model of *architecture*."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = build_config(architecture, find_size(architecture, SIZE))
    model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.randint(model.config.vocab_size, (2, 64))

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    with attach(model, PyAOConfig(policy="all", min_bytes=0, keep_last_layers=0)) as offloader:
        for _ in range(2):
            step()
        ways: dict[str, Callable[[], object | None]] = {
            "plain": lambda: None,
            "profiler": lambda: _listener(StepProfiler, offloader),
            "rule": lambda: _listener(PackIntervals, offloader),
        }
        times_ms: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(num_rounds):
            for name, make in ways.items():
                observer: Any = make()
                offloader.engine.observe(observer)
                step()  # the first of a kind is not counted
                start = time.process_time()
                step()
                times_ms[name].append((time.process_time() - start) * 1e3)
        offloader.engine.observe(None)
        before = offloader.engine.num_packs
        step()
        num_packs = offloader.engine.num_packs - before
    plain_ms = statistics.median(times_ms["plain"])
    row: dict[str, Any] = {"model": architecture, "num_packs": num_packs, "step_ms": plain_ms}
    for name in ("profiler", "rule"):
        turns = list(zip(times_ms[name], times_ms["plain"], strict=True))
        row[f"{name}_ratio"] = statistics.median(with_it / without for with_it, without in turns)
        row[f"{name}_us_per_tensor"] = (
            statistics.median(with_it - without for with_it, without in turns) * 1e3 / num_packs
        )
    return row


def _listener(kind: type[PackIntervals], offloader: Offloader) -> PackIntervals:
    return kind(offloader.transport, offloader.device, MOST_STEPS, lambda _: None)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=["opt", "gpt2", "llama"])
    parser.add_argument("--rounds", type=int, default=100, help="turns (default: %(default)s)")
    parser.add_argument("--result", type=Path, help="write the figures here")
    parser.add_argument("--smoke", action="store_true", help="one turn, for CI")
    args = parser.parse_args(argv)
    if args.smoke:
        args.rounds = 1
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; expected 1 or more")
    return args


if __name__ == "__main__":
    main()
