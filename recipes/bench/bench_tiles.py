"""CPU time and peak bytes of an MLP in tiles against the same one whole, as JSON.

    python recipes/bench/bench_tiles.py --result tiled_mlp.json
    python recipes/bench/bench_tiles.py --smoke

What is timed is forward and backward of one MLP, gradients of input and weights included. Tiles
stand for running the MLP's forward once more in backward, but for its last product, which no
gradient needs. The time is given against the MLP whole, against that and what runs again (with its
graph, all tokens at once), and against that and one whole forward. The ways take turns, and what is
compared is CPU time of one thread, which other processes on the machine disturb less than they do
wall time. Peak bytes are those that the allocator handed out, beside the input and the weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig, OPTConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_pyao.model.tiles import TiledCall, plan_tiles, run_in_tiles
from hf_pyao.model.tiles.weight_sums import SummedProducts, WeightSums

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.turns import peak_bytes, times_in_turns
from result_file import write_result

SCHEMA_VERSION = 1


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table, and write JSON if asked."""
    arguments = _parse(argv)
    torch.set_num_threads(1)
    rows = []
    for kind in MLPS:
        for num_tokens in arguments.tokens:
            for tiles in arguments.tiles:
                rows.append(_measure(kind, num_tokens, tiles, arguments))
                _print_row(rows[-1])
    if arguments.result:
        write_result(
            arguments.result,
            kind="tiled MLP",
            schema_version=SCHEMA_VERSION,
            config={**vars(arguments), "result": None, "num_threads": torch.get_num_threads()},
            rows=rows,
        )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="of a call")
    parser.add_argument("--tiles", type=int, nargs="+", default=[8], help="of a call")
    parser.add_argument("--hidden", type=int, default=768, help="hidden size")
    parser.add_argument("--inner", type=int, default=2048, help="size inside the MLP")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each way")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--result", help="write JSON here")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.tokens, arguments.hidden, arguments.inner = [64], 32, 64
        arguments.rounds = 2
    return arguments


def _llama(hidden: int, inner: int) -> nn.Module:
    return LlamaMLP(LlamaConfig(hidden_size=hidden, intermediate_size=inner))


def _gpt2(hidden: int, inner: int) -> nn.Module:
    return GPT2MLP(inner, GPT2Config(n_embd=hidden, resid_pdrop=0.0))


def _opt(hidden: int, inner: int) -> nn.Module:
    config = OPTConfig(hidden_size=hidden, ffn_dim=inner)
    up = nn.Linear(hidden, inner, bias=config.enable_bias)
    return nn.Sequential(up, nn.ReLU(), nn.Linear(inner, hidden, bias=config.enable_bias))


MLPS: dict[str, Callable[[int, int], nn.Module]] = {"llama": _llama, "gpt2": _gpt2, "opt": _opt}


def _measure(
    kind: str, num_tokens: int, tiles: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    torch.manual_seed(0)
    mlp = MLPS[kind](arguments.hidden, arguments.inner).train()
    hidden = torch.randn(1, num_tokens, arguments.hidden, requires_grad=True)
    grad = torch.randn(1, num_tokens, arguments.hidden)
    call = TiledCall(
        function=mlp.forward,
        weights=lambda: list(mlp.parameters()),
        plan=plan_tiles(num_tokens, tiles, 0, 0),
    )
    ways: dict[str, Callable[[], object]] = {
        "whole": partial(_step, mlp, mlp, hidden, grad),
        "tiled": partial(_step, mlp, partial(run_in_tiles, call), hidden, grad),
        "forward": partial(_forward, mlp, hidden),
        "again": partial(_again, mlp, call, hidden),
    }
    ways["tiled"]()  # sees which product is the last
    times = times_in_turns(ways, arguments.rounds)
    whole, tiled, forward, again = (times[f"{way}_cpu"].median_ms for way in ways)
    return {
        "mlp": kind,
        "num_tokens": num_tokens,
        "num_tiles": call.plan.num_tiles,
        "tile_tokens": call.plan.tile_tokens,
        "num_hidden": arguments.hidden,
        "num_inner": arguments.inner,
        "dtype": "float32",
        "cpu_time_ratio": tiled / whole,
        "cpu_time_ratio_with_what_runs_again": tiled / (whole + again),
        "cpu_time_ratio_with_one_forward_more": tiled / (whole + forward),
        "peak_bytes": {way: peak_bytes(ways[way]) for way in ("whole", "tiled")},
        **{name: each for name, each in times.items() if name.endswith("_cpu")},
    }


def _step(mlp: nn.Module, run: Callable[[Tensor], Tensor], hidden: Tensor, grad: Tensor) -> None:
    torch.autograd.grad(run(hidden), [hidden, *mlp.parameters()], grad)


def _forward(mlp: nn.Module, hidden: Tensor) -> Tensor:
    """Run the forward once more: with its graph."""
    output: Tensor = mlp(hidden)
    return output


def _again(mlp: nn.Module, call: TiledCall, hidden: Tensor) -> Tensor:
    """Run what the backward of tiles runs again: all but the last product."""
    assert call.ending.last, "a tiled forward comes first, and sees which product is the last"
    with SummedProducts(WeightSums(()), call.ending):
        output: Tensor = mlp(hidden)
    return output


def _print_row(row: dict[str, Any]) -> None:
    peaks = row["peak_bytes"]
    whole, tiled, again = (row[f"{way}_cpu"].median_ms for way in ("whole", "tiled", "again"))
    print(
        f"{row['mlp']:5} {row['num_tokens']:6} tokens in {row['num_tiles']} tiles: "
        f"whole {whole:8.1f} ms, what runs again {again:8.1f} ms, "
        f"tiled {tiled:8.1f} ms (x {row['cpu_time_ratio']:.3f}, "
        f"x {row['cpu_time_ratio_with_what_runs_again']:.3f} with what runs again, "
        f"x {row['cpu_time_ratio_with_one_forward_more']:.3f} with one forward more); peak "
        f"{peaks['whole'] / 2**20:6.1f} MiB, {peaks['tiled'] / 2**20:6.1f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
