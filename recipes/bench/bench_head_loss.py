"""Time and peak bytes of the chunked head loss against the model's own.

    python recipes/bench/bench_head_loss.py --result head_loss_time.json
    python recipes/bench/bench_head_loss.py --smoke

What is timed is forward and backward of a transformers model without layers: final norm, head and
loss. The two ways take turns, and the ratio is of CPU time of one thread, which other processes on
the machine disturb less than they do wall time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.board_trial import peak_of_step
from bench.harness import CLOCKS, parser_of, show, times_in_turns, write
from hf_pyao.model.head.head_loss import install_head_loss

SCHEMA_VERSION = 1
NUM_WARMUP = 1
COLUMNS = {
    "vocabulary": "{num_vocab:,}",
    "tokens": "{num_tokens}",
    "own, ms": "{own_cpu.median_ms:.1f}",
    "chunks": "{head_loss_num_chunks:.0f}",
    "chunked, ms": "{chunked_cpu.median_ms:.1f}",
    "ratio": "{cpu_time_ratio:.3f}",
    "own peak, bytes": "{peak_bytes[own]:,}",
    "chunked peak, bytes": "{peak_bytes[chunked]:,}",
}


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table, and write JSON if asked."""
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--vocab", type=int, nargs="+", default=[50_257, 128_256])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1024, 1024])
    parser.add_argument(
        "--budget_mib", type=float, nargs="+", default=[512, 512, 128], help="MiB a chunk, for each"
    )
    parser.add_argument("--hidden", type=int, default=768, help="hidden size")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.vocab, arguments.tokens, arguments.hidden = [999], [64, 300], 32
        arguments.budget_mib, arguments.rounds = [512, 1], 2
    torch.set_num_threads(1)
    rows = [
        _measure(num_vocab, num_tokens, budget_mib, arguments)
        for num_vocab in arguments.vocab
        for num_tokens, budget_mib in zip(arguments.tokens, arguments.budget_mib, strict=True)
    ]
    show(rows, COLUMNS)
    write(arguments, "head loss time", SCHEMA_VERSION, rows=rows)


def _measure(
    num_vocab: int, num_tokens: int, budget_mib: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    torch.manual_seed(0)
    models = {way: _model(num_vocab, arguments.hidden) for way in ("own", "chunked")}
    budget_bytes = int(budget_mib * 2**20)
    handle = install_head_loss(models["chunked"], "chunked", budget_bytes=budget_bytes)
    embedded = torch.randn(1, num_tokens, arguments.hidden)
    labels = torch.randint(0, num_vocab, (1, num_tokens))
    ways = {way: partial(_step, model, embedded, labels) for way, model in models.items()}
    found = times_in_turns(ways, arguments.rounds, NUM_WARMUP)
    times = {f"{way}_{clock}": found[way][clock] for clock in CLOCKS for way in ways}
    ratios = {
        f"{clock}_time_ratio": times[f"chunked_{clock}"].median_ms / times[f"own_{clock}"].median_ms
        for clock in CLOCKS
    }
    return {
        "num_vocab": num_vocab,
        "num_tokens": num_tokens,
        "num_hidden": arguments.hidden,
        "dtype": "float32",
        "budget_mib": budget_mib,
        **ratios,
        "peak_bytes": {way: _peak_bytes(models[way], step) for way, step in ways.items()},
        **handle.metrics(),
        **times,
    }


def _model(num_vocab: int, num_hidden: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=num_vocab,
        hidden_size=num_hidden,
        intermediate_size=num_hidden,
        num_hidden_layers=0,
        num_attention_heads=1,
    )
    return LlamaForCausalLM(config).train()


def _step(model: LlamaForCausalLM, embedded: torch.Tensor, labels: torch.Tensor) -> None:
    model.zero_grad()
    hidden = embedded.clone().requires_grad_()
    model(inputs_embeds=hidden, labels=labels, use_cache=False).loss.backward()


def _peak_bytes(model: LlamaForCausalLM, step: Callable[[], object]) -> int | None:
    model.zero_grad()
    return peak_of_step(torch.device("cpu"), step)


if __name__ == "__main__":
    main()
