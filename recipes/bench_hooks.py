"""Measure what hf_pyao costs per saved tensor, copies excluded, above an identity hook.

    python recipes/bench_hooks.py
    python recipes/bench_hooks.py --result recipes/results/hook_cost.json

The same forward and backward run under identity hooks and under the engine, in turns; the cost is
the difference of the medians, less the time of the copies, divided by the number of saved tensors.
All that the engine does is in it, module hooks and the release of buffers included. Processor
time is counted, so that other work on the machine matters less.

Two kinds of rows: layers of real models, whose saved tensors are parameters, views of one storage,
small statistics and activations in the proportions that training has; and chains of operations
whose saved tensors are all of one kind: moved (each a storage of its own), seen before (one storage
saved again and again) and kept (below ``min_bytes``).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_pyao import ModuleMap, PyAOConfig, attach, register_module_map
from hf_pyao.metrics import MicroBatchStats
from hf_pyao.runtime.transport import BlockingTransport, DoneTicket
from result_file import write_result

SCHEMA_VERSION = 1
TARGET_US = 5.0


class _TimedCopies(BlockingTransport):
    """Copies, since backward on other numbers takes another time, and counts the time of copies."""

    def __init__(self) -> None:
        super().__init__()
        self.copy_s = 0.0

    def offload(self, src: torch.Tensor, dst: torch.Tensor, **_: Any) -> DoneTicket:
        start = time.perf_counter()
        dst.copy_(src)
        self.copy_s += time.perf_counter() - start
        return DoneTicket(src.nbytes)

    reload = offload


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


def layers_of(architecture: str, num_layers: int = 6) -> tuple[nn.Module, dict[str, Any]]:
    """Return a narrow model of *architecture* and its batch: little arithmetic, all the hooks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, dict[str, Any]] = {
        "opt": {"hidden_size": 64, "num_hidden_layers": num_layers, "num_attention_heads": 4}
        | {"ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 32},
        "gpt2": {"n_embd": 64, "n_layer": num_layers, "n_head": 4, "n_positions": 32},
        "llama": {"hidden_size": 64, "num_hidden_layers": num_layers, "num_attention_heads": 4}
        | {"intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 32},
    }
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = AutoConfig.for_model(architecture, vocab_size=64, **tokens, **sizes[architecture])
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (1, 16))
    return AutoModelForCausalLM.from_config(config).train(), {"input_ids": ids, "use_cache": False}


def chain_of(kind: str, length: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return a layer of *length* operations that save one tensor each, and its input."""
    shared = torch.randn(64)
    operations: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "moved": torch.sin,
        "kept": torch.sin,
        "seen before": lambda x: x * shared,
    }
    model = HookBenchStack(Chain(operations[kind], length)).train()
    return model, {"x": torch.randn(64, requires_grad=True)}


MIN_BYTES = {"moved": 0, "seen before": 0, "kept": 2**30, "opt": 1024, "gpt2": 1024, "llama": 1024}
"""In the narrow models, above the statistics of norms and attention and below activations, as the
default lies in models of real size."""


def measure(kind: str, length: int, rounds: int) -> dict[str, float | str]:
    """Return the microseconds per saved tensor, pack and unpack, of both ways."""
    is_model = kind in ("opt", "gpt2", "llama")
    model, inputs = layers_of(kind) if is_model else chain_of(kind, length)
    config = PyAOConfig(min_bytes=MIN_BYTES[kind], keep_last_layers=0)

    def run(context: AbstractContextManager[Any]) -> float:
        start = time.process_time()
        with context:
            output = model(**inputs)
        output = output.logits if is_model else output
        output.backward(torch.ones_like(output))
        elapsed = time.process_time() - start
        model.zero_grad()
        return elapsed * 1e6

    seen: list[None] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(None), t)[1], lambda t: t):
        model(**inputs)
    num_in_forward = len(seen)
    times: dict[str, list[float]] = {"none": [], "identity": [], "hf_pyao": []}
    stats = MicroBatchStats()
    for _ in range(rounds):
        times["none"].append(run(nullcontext()))
        times["identity"].append(run(_identity_hooks()))
        transport = _TimedCopies()
        with attach(model, config, transport=transport) as offloader:
            run(nullcontext())
            transport.copy_s = 0.0
            elapsed_us = run(nullcontext())
            times["hf_pyao"].append(elapsed_us - transport.copy_s * 1e6)
            run(nullcontext())
            assert offloader.engine.last_stats is not None
            stats = offloader.engine.last_stats
    none_us = statistics.median(times["none"])
    identity_us = (statistics.median(times["identity"]) - none_us) / num_in_forward
    above = [(t - none_us) / stats.num_packs - identity_us for t in times["hf_pyao"]]
    quartiles = statistics.quantiles(above, n=4)
    return {
        "kind": kind,
        "identity_us": round(identity_us, 3),
        "above_identity_us": round(quartiles[1], 3),
        "quartile_1_us": round(quartiles[0], 3),
        "quartile_3_us": round(quartiles[2], 3),
        "num_rounds": rounds,
        "num_saved_tensors": stats.num_packs,
        "num_slots": stats.num_slots,
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
    rows = [measure(kind, args.length, args.rounds) for kind in MIN_BYTES]
    print("Microseconds per saved tensor (pack + unpack), copies excluded:")
    print(f"{'':<12} {'saved tensors':>14} {'identity hook':>14} {'above identity':>15}")
    for row in rows:
        print(
            f"{row['kind']:<12} {row['num_saved_tensors']:>14} {row['identity_us']:>14.2f} "
            f"{row['above_identity_us']:>15.2f}"
        )
    if args.result is not None:
        write_result(
            args.result,
            kind="hook_cost",
            schema_version=SCHEMA_VERSION,
            target_above_identity_us=TARGET_US,
            rows=rows,
        )


if __name__ == "__main__":
    main()
