"""Measure what hf_pyao costs per saved tensor, copies excluded.

    python recipes/bench/bench_hooks.py
    python recipes/bench/bench_hooks.py --against ../hf_pyao-before --rounds 240

The same forward and backward run in turns: with identity hooks; attached, with identity hooks in
place of the engine's pack and unpack; and attached as usual. Differences of medians, divided by the
number of saved tensors, tell what each part costs, all that follows from it included (garbage
collection, colder caches). Processor time is counted, so that other work on the machine matters
less. The time of the copies themselves is taken off.

``hooks``: pack and unpack, and what a copy takes besides copying bytes. ``modules``: entering and
leaving layers, and naming sub-modules.

Two kinds of rows: layers of real models, whose saved tensors are parameters, views of one storage,
small statistics and activations in the proportions that training has; and chains of operations
whose saved tensors are all of one kind: moved (each a storage of its own), seen before (one storage
saved again and again) and kept (below ``min_bytes``).

``--against`` measures the package of another checkout in the same run, in turns of a few rounds
each; the ratio is the median of those of single turns, since a machine's speed changes from one to
the next.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from hf_pyao import ModuleMap, PyAOConfig, attach, register_module_map
from hf_pyao.engine.transfer.transport import BlockingTransport, DoneTicket

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness import parser_of, show, write

SCHEMA_VERSION = 3
NUM_WARM_UP = 3
ROUNDS_PER_TURN = 6
MIN_BYTES = {"moved": 0, "seen before": 0, "kept": 2**30, "opt": 1024, "gpt2": 1024, "llama": 1024}
"""In the narrow models, above the statistics of norms and attention and below activations, as the
default lies in models of real size."""

Parts = dict[str, list[float]]
"""Of each round, microseconds per saved tensor; and how many tensors there were."""


class QueuedTicket(DoneTicket):
    """A copy that counts as queued: on a CPU what is saved again would be copied again."""


class TimedCopies(BlockingTransport):
    """Copies, since backward on other numbers takes another time, and counts the time of copies."""

    copying_s = 0.0

    def offload(self, src: torch.Tensor, dst: torch.Tensor, **_: Any) -> DoneTicket:
        start = time.perf_counter()
        dst.copy_(src)
        self.copying_s += time.perf_counter() - start
        return QueuedTicket(src.nbytes)

    reload = offload


class HookBenchStack(nn.Module):
    """A model of one layer of *length* operations, each of which saves one tensor."""

    def __init__(self, operation: Callable[[torch.Tensor], torch.Tensor], length: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Chain(operation, length)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


class _Chain(nn.Module):
    def __init__(self, operation: Callable[[torch.Tensor], torch.Tensor], length: int) -> None:
        super().__init__()
        self.operation, self.length = operation, length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.length):
            x = self.operation(x)
        return x


def subject(kind: str, length: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model and its batch: little arithmetic, all the hooks.

    Args:
        kind: a key of :data:`MIN_BYTES`.
        length: saved tensors of a chain.
    """
    torch.manual_seed(0)
    if kind in ("moved", "kept", "seen before"):
        shared = torch.randn(64)
        operation = (lambda x: x * shared) if kind == "seen before" else torch.sin
        return HookBenchStack(operation, length).train(), {"x": torch.randn(64, requires_grad=True)}
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
        "gpt2": {},
        "llama": {"intermediate_size": 128, "num_key_value_heads": 2},
    }[kind]
    sizes |= {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "vocab_size": 64}
    config = AutoConfig.for_model(kind, max_position_embeddings=32, **tokens, **sizes)
    batch = {"input_ids": torch.randint(0, 64, (1, 16)), "use_cache": False}
    return AutoModelForCausalLM.from_config(config).train(), batch


def costs(kind: str, length: int, rounds: int) -> Parts:
    """Measure *rounds* of one kind."""
    model, inputs = subject(kind, length)
    copies = TimedCopies()

    def run_us() -> float:
        times_us = []
        for _ in range(2):  # what ends with the next forward is its own
            copies.copying_s = 0.0
            start_s = time.process_time()
            output = model(**inputs)
            output = getattr(output, "logits", output)
            output.backward(torch.ones_like(output))
            times_us.append((time.process_time() - start_s - copies.copying_s) * 1e6)
            model.zero_grad()
        return times_us[1]

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        identity_us = [run_us() for _ in range(NUM_WARM_UP + rounds)][NUM_WARM_UP:]
    found: Parts = {"hooks": [], "modules": [], "num_saved_tensors": []}
    config = PyAOConfig(policy="all", min_bytes=MIN_BYTES[kind], keep_last_layers=0)
    with attach(model, config, transport=copies) as offloader:
        engine = offloader.engine
        own = engine.pack, engine.unpack
        identity = (lambda call, tensor: tensor), (lambda handle: handle)
        for number in range(-NUM_WARM_UP, rounds):
            engine.pack, engine.unpack = identity
            attached_us = run_us()
            engine.pack, engine.unpack = own
            before = engine.num_packs
            own_us = run_us()
            num_packs = (engine.num_packs - before) / 2
            if number >= 0:
                found["hooks"].append((own_us - attached_us) / num_packs)
                found["modules"].append((attached_us - median(identity_us)) / num_packs)
                found["num_saved_tensors"].append(num_packs)
    return found


def work() -> None:
    """Answer each line on standard input, the arguments of :func:`costs`, with its result."""
    torch.set_num_threads(1)
    # With other hooks in its place, the engine warns that nothing was saved.
    logging.getLogger("hf_pyao").setLevel(logging.ERROR)
    register_module_map("HookBenchStack", ModuleMap(layers=("layers",)))
    for line in sys.stdin:
        print(json.dumps(costs(*json.loads(line))), flush=True)


def compare(checkouts: list[Path], kind: str, length: int, rounds: int) -> dict[str, Any]:
    """Measure one kind with the package of each checkout in turns; return the row."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, __file__, "--worker"],
                    env={**os.environ, "PYTHONPATH": str(checkout)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for checkout in checkouts
        ]
        turns: list[list[Parts]] = [[] for _ in workers]
        for turn in range(-(-rounds // ROUNDS_PER_TURN)):
            for index in sorted(range(len(workers)), reverse=turn % 2 == 1):
                process = workers[index]
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps([kind, length, ROUNDS_PER_TURN]) + "\n")
                process.stdin.flush()
                turns[index].append(json.loads(process.stdout.readline()))
    here, *others = turns
    row: dict[str, Any] = {"kind": kind, "against_us": None, "ratio": None}
    for part in here[0]:
        row[part] = round(median(value for turn in here for value in turn[part]), 3)
    for other in others:
        row["against_us"] = round(median(value for turn in other for value in turn["hooks"]), 3)
        ratios = (
            median(ours["hooks"]) / median(theirs["hooks"])
            for ours, theirs in zip(here, other, strict=True)
        )
        row["ratio"] = round(median(ratios), 3)
    return row


def main() -> None:
    """Measure, print a table, and write the result file if asked to."""
    parser = parser_of(__doc__, rounds=42)
    parser.add_argument("--length", type=int, default=300, help="saved tensors of a chain (300)")
    parser.add_argument("--against", type=Path, help="compare with the package in this checkout")
    parser.add_argument("--worker", action="store_true", help="(for its own processes)")
    args = parser.parse_args()
    if args.worker:
        work()
        return
    if args.smoke:
        args.rounds, args.length = 2, 10
    checkouts = [Path(__file__).resolve().parents[2]]
    if args.against is not None:
        if not (args.against / "hf_pyao" / "__init__.py").is_file():
            parser.error(f"--against is {args.against}; expected a checkout of hf_pyao")
        checkouts.append(args.against.resolve())
    rows = [compare(checkouts, kind, args.length, args.rounds) for kind in MIN_BYTES]
    print("Microseconds per saved tensor, copies excluded:")
    names = ("kind", "num_saved_tensors", "hooks", "modules", "against_us", "ratio")
    show(rows, {name: f"{{{name}}}" for name in names})
    write(args, "hook_cost", SCHEMA_VERSION, rows=rows)


if __name__ == "__main__":
    main()
