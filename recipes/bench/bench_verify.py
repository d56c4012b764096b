"""Measure what comparing second runs with first ones costs (``verify_recompute``).

    python recipes/bench/bench_verify.py --device cuda --models llama:1.2b@8 opt:1.3b@8 gpt2:0.8b@5
    python recipes/bench/bench_verify.py --device cpu --models llama:tiny@2 --length 64

Every layer runs again (``checkpoint_every=1``). Micro-batches are timed by kind: not checked; the
first one that is checked, which takes projections too and on an accelerator runs each segment
twice; others that are checked. Attachments with and without checks take turns. The mean over a run
is that of these times, each as often as ``auto`` has its kind. Gradients are dropped as they are
complete, and an optimizer without them steps, since the result of a check is read before its step.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.recompute.verification import SEGMENT, SecondRunCheck, SecondRuns
from hf_pyao.tools.estimate.model_specs import config_of, parse_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from result_file import write_result

SCHEMA_VERSION = 1
KINDS = ("unchecked", "first", "checked")


def counts_of(num_micro_batches: int) -> Counter[str]:
    """Return how many micro-batches of each kind ``auto`` has, by asking what decides."""
    second_runs = SecondRuns(SecondRunCheck("auto"), SEGMENT)
    counts: Counter[str] = Counter()
    for number in range(num_micro_batches):
        check = second_runs.of_forward(number)
        counts["unchecked" if check is None else kind_of(number)] += 1
    return counts


def kind_of(number: int) -> str:
    """Return the kind of checked micro-batch *number* since the checks began."""
    return "checked" if number else "first"


class Steps:
    """Times micro-batches of a model whose layers run again."""

    def __init__(self, model: nn.Module, batch: dict[str, Any]) -> None:
        self._model = model
        self._batch = batch
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self._device = next(model.parameters()).device
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_drop_gradient)

    def times_ms(self, mode: str, num_steps: int) -> list[float]:
        """Return the time of each of *num_steps* micro-batches of a new attachment, with steps."""
        config = PyAOConfig(policy="all", checkpoint_every=1, verify_recompute=mode)
        with attach(self._model, config):
            marks = [self._mark()]
            for _ in range(num_steps):
                self._model(**self._batch).loss.backward()
                self._optimizer.step()
                marks.append(self._mark())
            self._wait()
        return [_between(a, b) for a, b in itertools.pairwise(marks)]

    def _mark(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device.type, enable_timing=True)
        event.record()
        return event

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _between(before: Any, after: Any) -> float:
    if isinstance(before, float):
        return float(after - before) * 1e3
    return float(before.elapsed_time(after))


def measure(steps: Steps, rounds: int, num_checked: int) -> dict[str, list[float]]:
    """Return the times of micro-batches by kind, after a round that warms up."""
    times_ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for index in range(rounds + 1):
        unchecked = steps.times_ms("off", num_checked)[1:]
        checked = steps.times_ms("always", num_checked)
        if index:
            times_ms["unchecked"] += unchecked
            for number, each_ms in enumerate(checked):
                times_ms[kind_of(number)].append(each_ms)
    return times_ms


def model_on(device: str, name: str) -> nn.Module:
    """Return the model that *name* is for (``pyao estimate --help``), bfloat16 off a CPU."""
    config = config_of(parse_model(name))
    config.use_cache = False
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to(device).train()


def point(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Measure the model and micro-batch that *name* is for, print it, and return it."""
    model_name, _, size = name.partition("@")
    model = model_on(options.device, model_name)
    shape = (int(size or 1), options.length)
    ids = torch.zeros(shape, dtype=torch.int64, device=options.device)
    steps = Steps(model, {"input_ids": ids, "labels": ids})
    times_ms = measure(steps, options.rounds, options.checked)
    medians = {kind: statistics.median(times_ms[kind]) for kind in KINDS}
    counts = counts_of(options.run)
    base_ms = medians["unchecked"]
    mean_ms = sum(counts[kind] * medians[kind] for kind in KINDS) / options.run
    rows: list[dict[str, Any]] = [
        {
            "kind": kind,
            "median_ms": medians[kind],
            "range_ms": [min(times_ms[kind]), max(times_ms[kind])],
            "ratio": medians[kind] / base_ms,
            "num_in_run": counts[kind],
        }
        for kind in KINDS
    ]
    print(f"{name}, {options.length} tokens: mean over {options.run} {mean_ms / base_ms - 1:+.2%}")
    for row in rows:
        low, high = row["range_ms"]
        print(
            f"  {row['kind']:9} {row['median_ms']:9.2f} ms ({low:.2f} to {high:.2f}): "
            f"{row['ratio']:.3f} times, {row['num_in_run']} of {options.run}"
        )
    return {
        "model": model_name,
        "micro_batch": shape[0],
        "sequence_length": shape[1],
        "mean_cost": mean_ms / base_ms - 1,
        "kinds": rows,
    }


def main(argv: list[str] | None = None) -> None:
    """Measure; print the times, write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--device-name", default="", help="what the device is, for the result")
    parser.add_argument("--models", nargs="+", default=["llama:tiny@2"], metavar="MODEL@BATCH")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checked", type=int, default=5, help="checked micro-batches in a round")
    parser.add_argument("--run", type=int, default=1000, help="micro-batches of the run")
    parser.add_argument("--result", help="write JSON here")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    rows = [point(options, name) for name in options.models]
    if options.result:
        write_result(
            options.result,
            kind="verify cost",
            schema_version=SCHEMA_VERSION,
            device=options.device_name or options.device,
            rows=rows,
        )


if __name__ == "__main__":
    main()
