"""Measure what recording a layer's operations costs, against a dispatch mode that does nothing.

    python recipes/bench/bench_tracing.py
    python recipes/bench/bench_tracing.py --result recipes/results/tracing_cost.json

One decoder layer of each architecture runs its forward plainly, under an empty dispatch mode, and
under a trace (opening and forgetting it included), in turns and in one process. The layers are
small, so that Python is what is timed; processor time is counted, so that other work on the machine
matters less. The cost of a mode is the difference of medians to the plain run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from hf_pyao.engine.recompute.operations import Rules
from hf_pyao.engine.recompute.tracing import Trace
from hf_pyao.model.map.module_map import find_layers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from result_file import write_result

SCHEMA_VERSION = 1
MOST_TIMES_EMPTY = 3.0
CALLS_PER_SAMPLE = 10

MODELS: dict[str, dict[str, Any]] = {
    "opt": {"word_embed_proj_dim": 64, "ffn_dim": 256, "hidden_size": 64, "num_hidden_layers": 1},
    "gpt2": {"n_embd": 64, "n_layer": 1, "n_head": 4},
    "llama": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1},
}
HEADS = {"num_attention_heads": 4, "vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2}


class EmptyMode(TorchDispatchMode):
    """Sees every operation and notes nothing."""

    only_watches = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class CountingMode(EmptyMode):
    """Counts operations."""

    num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operations += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def tracing(rules: Rules) -> Any:
    """Trace what runs inside, as the engine does for one layer call."""
    trace = Trace([""], frozenset(), lambda tensor, key: False, rules)
    trace.start()
    try:
        yield
    finally:
        trace.stop()
        trace.close()


def layer_call(model_type: str) -> Callable[[], None]:
    """Return a function that runs the forward of one decoder layer."""
    config = AutoConfig.for_model(model_type, **{**HEADS, **MODELS[model_type]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    seen: list[Any] = []
    layer = find_layers(model).layers[0][1]
    hook = layer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
    )
    model(input_ids=torch.ones(2, 16, dtype=torch.long), use_cache=False)
    hook.remove()
    args, kwargs = seen[0]
    return lambda: layer(*args, **kwargs)


def sample(run: Callable[[], None], around: Callable[[], AbstractContextManager[Any]]) -> float:
    """Return the microseconds of processor time that one call takes."""
    start = time.process_time_ns()
    for _ in range(CALLS_PER_SAMPLE):
        with around():
            run()
    return (time.process_time_ns() - start) / 1e3 / CALLS_PER_SAMPLE


def measure(model_type: str, rounds: int) -> dict[str, Any]:
    """Return the costs of both modes on one layer of *model_type*."""
    run, rules = layer_call(model_type), Rules()
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "plain": nullcontext,
        "empty_mode": EmptyMode,
        "trace": lambda: tracing(rules),
    }
    counting = CountingMode()
    with counting:
        run()
    times_us: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(rounds + 1):
        for name, around in ways.items():
            elapsed_us = sample(run, around)
            if index:  # the first round warms up
                times_us[name].append(elapsed_us)
    median = {name: statistics.median(values) for name, values in times_us.items()}
    empty_us, trace_us = median["empty_mode"] - median["plain"], median["trace"] - median["plain"]
    return {
        "model": model_type,
        "num_operations": counting.num_operations,
        **{f"{name}_us": value for name, value in median.items()},
        "empty_mode_cost_us": empty_us,
        "trace_cost_us": trace_us,
        "times_empty_mode": trace_us / empty_us,
        "num_samples": rounds,
    }


def main(argv: list[str] | None = None) -> None:
    """Measure all architectures; print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--result", help="write JSON here")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = [measure(model_type, arguments.rounds) for model_type in MODELS]
    for row in rows:
        print(
            f"{row['model']:6} {row['num_operations']:4} operations  "
            f"plain {row['plain_us']:7.0f} us  empty mode +{row['empty_mode_cost_us']:5.0f} us  "
            f"trace +{row['trace_cost_us']:5.0f} us: {row['times_empty_mode']:.2f} times that"
        )
    if arguments.result:
        write_result(
            arguments.result,
            kind="tracing cost",
            schema_version=SCHEMA_VERSION,
            config={"rounds": arguments.rounds, "calls_per_sample": CALLS_PER_SAMPLE},
            target_times_empty_mode=MOST_TIMES_EMPTY,
            rows=rows,
        )


if __name__ == "__main__":
    main()
