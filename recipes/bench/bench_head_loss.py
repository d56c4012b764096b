"""Time, peak bytes and loss curve of the chunked head loss against the model's own, as JSON.

    python recipes/bench/bench_head_loss.py --out head_loss_time.json
    python recipes/bench/bench_head_loss.py --curve --out head_loss_curve.json
    python recipes/bench/bench_head_loss.py --smoke

What is timed is forward and backward of a transformers model without layers: final norm, head and
loss. The two ways take turns, and the ratio is of CPU time of one thread, which other processes on
the machine disturb less than they do wall time. The curve trains a small model on the sources of
Python's standard library, both ways from the same seeds.
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

from bench.head_loss_curve import compare_curves
from bench.turns import peak_bytes, times_in_turns
from hf_pyao.model.head.head_loss import install_head_loss
from result_file import write_result

SCHEMA_VERSION = 1


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table, and write JSON if asked."""
    arguments = _parse(argv)
    torch.set_num_threads(1)
    if arguments.curve:
        kind, rows = "head loss curve", compare_curves(arguments.steps, arguments.seeds)
    else:
        kind, rows = "head loss time", []
        for num_vocab in arguments.vocab:
            for num_tokens, budget_mib in zip(arguments.tokens, arguments.budget_mib, strict=True):
                rows.append(_measure(num_vocab, num_tokens, budget_mib, arguments))
                _print_row(rows[-1])
    if arguments.out:
        write_result(
            arguments.out,
            kind=kind,
            schema_version=SCHEMA_VERSION,
            config={**vars(arguments), "out": None, "num_threads": torch.get_num_threads()},
            rows=rows,
        )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=[50_257, 128_256])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1024, 1024])
    parser.add_argument(
        "--budget_mib", type=float, nargs="+", default=[512, 512, 128], help="MiB a chunk, for each"
    )
    parser.add_argument("--hidden", type=int, default=768, help="hidden size")
    parser.add_argument("--rounds", type=int, default=7, help="timed runs of each way")
    parser.add_argument("--curve", action="store_true", help="compare loss curves instead")
    parser.add_argument("--steps", type=int, default=200, help="steps of a curve")
    parser.add_argument("--seeds", type=int, default=5, help="curves of each way")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--out", help="write JSON here")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.vocab, arguments.tokens, arguments.hidden = [999], [64, 300], 32
        arguments.budget_mib = [512, 1]
        arguments.rounds, arguments.steps, arguments.seeds = 2, 3, 2
    return arguments


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
    times = times_in_turns(ways, arguments.rounds)
    ratios = {
        f"{clock}_time_ratio": times[f"chunked_{clock}"].median_ms / times[f"own_{clock}"].median_ms
        for clock in ("wall", "cpu")
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


def _peak_bytes(model: LlamaForCausalLM, step: Callable[[], object]) -> int:
    model.zero_grad()
    return peak_bytes(step)


def _print_row(row: dict[str, Any]) -> None:
    own, chunked = row["own_cpu"].median_ms, row["chunked_cpu"].median_ms
    peaks = row["peak_bytes"]
    print(
        f"vocabulary {row['num_vocab']:7,} tokens {row['num_tokens']:5}: "
        f"own {own:9.1f} ms, {row['head_loss_num_chunks']:.0f} chunks {chunked:9.1f} ms "
        f"(x {row['cpu_time_ratio']:.3f}); peak {peaks['own'] / 2**20:7.1f} MiB, "
        f"{peaks['chunked'] / 2**20:7.1f} MiB"
    )


if __name__ == "__main__":
    main()
