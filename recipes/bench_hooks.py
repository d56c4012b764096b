"""Measure what hf_pyao costs per saved tensor, copies excluded, above an identity hook.

    python recipes/bench_hooks.py
    python recipes/bench_hooks.py --result recipes/results/hook_cost.json

A chain of element-wise operations saves one small tensor each. The same chain runs under identity
hooks and under the engine, with a transport that copies nothing, in turns; the cost is the
difference of the medians. Processor time is counted, so that other work on the machine matters
less. Three kinds of saved tensor are timed: moved (each a storage of its own), seen before (one
storage saved again and again) and kept (below ``min_bytes``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_pyao import ModuleMap, PyAOConfig, attach, register_module_map
from hf_pyao.report.provenance import collect_provenance
from hf_pyao.runtime.transport import BlockingTransport, DoneTicket

SCHEMA_VERSION = 1
TARGET_US = 5.0


class _NoCopies(BlockingTransport):
    """Leaves out the copies, so that only the engine's own work is timed."""

    def offload(self, src: torch.Tensor, dst: torch.Tensor, **_: Any) -> DoneTicket:
        return DoneTicket(src.numel())

    def reload(self, src: torch.Tensor, dst: torch.Tensor, **_: Any) -> DoneTicket:
        return DoneTicket(src.numel())


class Chain(nn.Module):
    """One layer of *length* operations, each of which saves one tensor."""

    def __init__(self, operation: Callable[[torch.Tensor], torch.Tensor], length: int) -> None:
        super().__init__()
        self.operation = operation
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.length):
            x = self.operation(x)
        return x


class HookBenchStack(nn.Module):
    """A model of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


def _identity_hooks() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


def measure(kind: str, length: int, rounds: int) -> dict[str, float | str]:
    """Return the microseconds per saved tensor, pack and unpack, of both ways."""
    shared = torch.randn(64)
    operations: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "moved": torch.sin,
        "kept": torch.sin,
        "seen before": lambda x: x * shared,
    }
    model = HookBenchStack(Chain(operations[kind], length)).train()
    config = PyAOConfig(min_bytes=2**30 if kind == "kept" else 0, keep_last_layers=0)
    x = torch.randn(64, requires_grad=True)

    def run(context: AbstractContextManager[Any]) -> float:
        start = time.process_time()
        with context:
            y = model(x)
        y.backward(torch.ones_like(y))
        x.grad = None
        return (time.process_time() - start) / length * 1e6

    times: dict[str, list[float]] = {"none": [], "identity": [], "hf_pyao": []}
    for _ in range(rounds):
        times["none"].append(run(nullcontext()))
        times["identity"].append(run(_identity_hooks()))
        with attach(model, config, transport=_NoCopies()):
            run(nullcontext())
            times["hf_pyao"].append(run(nullcontext()))
    medians = {name: statistics.median(values) for name, values in times.items()}
    quartiles = statistics.quantiles(times["hf_pyao"], n=4)
    return {
        "kind": kind,
        "identity_us": round(medians["identity"] - medians["none"], 3),
        "above_identity_us": round(medians["hf_pyao"] - medians["identity"], 3),
        "quartile_1_us": round(quartiles[0] - medians["identity"], 3),
        "quartile_3_us": round(quartiles[2] - medians["identity"], 3),
        "num_rounds": rounds,
        "num_saved_tensors": length,
    }


def main() -> None:
    """Measure, print a table, and write the result file if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=300, help="saved tensors a round (300)")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each way, in turns (40)")
    parser.add_argument("--result", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    register_module_map("HookBenchStack", ModuleMap(layers=("layers",)))
    rows = [measure(kind, args.length, args.rounds) for kind in ("moved", "seen before", "kept")]
    print("Microseconds per saved tensor (pack + unpack), copies excluded:")
    print(f"{'':<12} {'identity hook':>14} {'above identity':>15}")
    for row in rows:
        print(f"{row['kind']:<12} {row['identity_us']:>14.2f} {row['above_identity_us']:>15.2f}")
    if args.result is not None:
        document = {
            "schema_version": SCHEMA_VERSION,
            "kind": "hook_cost",
            "target_above_identity_us": TARGET_US,
            "provenance": dataclasses.asdict(collect_provenance()),
            "rows": rows,
        }
        args.result.parent.mkdir(parents=True, exist_ok=True)
        args.result.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"written to {args.result}")


if __name__ == "__main__":
    main()
