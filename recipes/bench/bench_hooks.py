"""Measure what hf_pyao costs per saved tensor, copies excluded, above an identity hook.

    python recipes/bench/bench_hooks.py
    python recipes/bench/bench_hooks.py --result recipes/results/hook_cost.json
    python recipes/bench/bench_hooks.py --against ../hf_pyao-before --rounds 240

The same forward and backward run in turns in five ways: without hooks; with identity hooks;
attached, with identity hooks in place of the engine's pack and unpack; attached, with the least
that hooks in Python do to move a tensor; and attached as usual. Differences of medians, divided by
the number of saved tensors, tell what each part costs, all that follows from it included (garbage
collection, colder caches). Processor time is counted, so that other work on the machine matters
less.

``pack + unpack``: above identity hooks, where the module hooks run in both. ``moving`` is apart:
what a copy takes besides copying bytes (host buffer, record, device buffer, window, calls of the
transport). ``module hooks``: entering and leaving layers, and naming sub-modules. ``all`` is the
sum. ``least``: no window, no prefetch, no pool, no storage told from another (:class:`LeastHooks`).

Two kinds of rows: layers of real models, whose saved tensors are parameters, views of one storage,
small statistics and activations in the proportions that training has; and chains of operations
whose saved tensors are all of one kind: moved (each a storage of its own), seen before (one storage
saved again and again) and kept (below ``min_bytes``).

``--against`` measures the package of another checkout in the same run, in turns of a few rounds
each, and prints what pack, unpack and moving cost in both; the ratio is the median of those of
single turns, since a machine's speed changes from one to the next.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_pyao import ModuleMap, PyAOConfig, attach, register_module_map

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from result_file import write_result

try:
    from hf_pyao.engine.transfer.transport import BlockingTransport, DoneTicket
except ImportError:  # an earlier checkout, which --against compares with
    from hf_pyao.transfer.transport import (  # type: ignore[import-not-found, no-redef]
        BlockingTransport,
        DoneTicket,
    )

SCHEMA_VERSION = 2
TARGET_US = 5.0


class Stopwatch:
    """Sums the time of the copies, and of what moving takes besides."""

    def __init__(self) -> None:
        self.copying_s = 0.0
        self.moving_s = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return *function*, whose time counts as moving; it calls no other that is timed so."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.moving_s += time.perf_counter() - start

        return run

    def take(self) -> tuple[float, float]:
        """Return the microseconds of copying, and of moving without it, since the last call."""
        copying_us, moving_us = self.copying_s * 1e6, self.moving_s * 1e6
        self.copying_s = self.moving_s = 0.0
        return copying_us, moving_us - copying_us


class QueuedTicket(DoneTicket):
    """A copy that counts as queued: on a CPU what is saved again would be copied again."""


class TimedCopies(BlockingTransport):
    """Copies, since backward on other numbers takes another time, and counts the time of copies."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        super().__init__()
        self.stopwatch = stopwatch

    def offload(self, src: torch.Tensor, dst: torch.Tensor, **_: Any) -> DoneTicket:
        start = time.perf_counter()
        dst.copy_(src)
        self.stopwatch.copying_s += time.perf_counter() - start
        return QueuedTicket(src.nbytes)

    reload = offload


class LeastHooks:
    """The least that hooks in Python do to move a tensor: copy, watch its version, copy back.

    Host memory is used again by layout. Parameters and what is below *min_bytes* are passed on.
    """

    def __init__(self, min_bytes: int, stopwatch: Stopwatch) -> None:
        self.min_bytes = min_bytes
        self.stopwatch = stopwatch
        self.spare: dict[Any, list[torch.Tensor]] = {}
        self.blanks: dict[torch.dtype, torch.Tensor] = {}

    def pack(self, call: object, tensor: torch.Tensor) -> Any:
        """Copy *tensor* to the host and let its memory go."""
        base = tensor._base
        owner = tensor if base is None else base
        if tensor.nbytes < self.min_bytes or type(owner) is nn.Parameter:
            return tensor
        size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
        spare = self.spare.setdefault((size, stride, dtype), [])
        host = spare.pop() if spare else torch.empty_strided(size, stride, dtype=dtype)
        if dtype not in self.blanks:
            self.blanks[dtype] = torch.empty(0, dtype=dtype)
        blank = self.blanks[dtype]
        counter, version = tensor.detach(), tensor._version
        start = time.perf_counter()
        host.copy_(counter)
        self.stopwatch.copying_s += time.perf_counter() - start
        counter.data = blank
        return counter, version, host, spare, blank

    def unpack(self, handle: Any) -> torch.Tensor:
        """Copy it back."""
        if isinstance(handle, torch.Tensor):
            return handle
        counter, version, host, spare, blank = handle
        if counter._version != version:
            raise RuntimeError("a saved tensor was changed in place")
        buffer: torch.Tensor = blank.new_empty_strided(host.size(), host.stride())
        start = time.perf_counter()
        buffer.copy_(host)
        self.stopwatch.copying_s += time.perf_counter() - start
        spare.append(host)
        return buffer


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


WAYS = ("none", "identity", "attached", "least", "hf_pyao")
NUM_BLOCKS = 4
ROUNDS_PER_TURN = 6
NUM_WARM_UP = 3


def measure(kind: str, length: int, rounds: int) -> dict[str, float | str]:
    """Return the microseconds per saved tensor of each part."""
    is_model = kind in ("opt", "gpt2", "llama")
    model, inputs = layers_of(kind) if is_model else chain_of(kind, length)
    config = PyAOConfig(policy="all", min_bytes=MIN_BYTES[kind], keep_last_layers=0)

    def run(context: AbstractContextManager[Any]) -> float:
        start = time.process_time()
        with context:
            output = model(**inputs)
        output = output.logits if is_model else output
        output.backward(torch.ones_like(output))
        elapsed_us = (time.process_time() - start) * 1e6
        model.zero_grad()
        return elapsed_us

    stopwatch = Stopwatch()
    least = LeastHooks(MIN_BYTES[kind], stopwatch)
    identity = (lambda call, tensor: tensor), (lambda handle: handle)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    moving: list[float] = []
    for _ in range(NUM_BLOCKS):
        for _ in range(rounds // NUM_BLOCKS):
            times["none"].append(run(nullcontext()))
            times["identity"].append(run(_identity_hooks()))
        with attach(model, config, transport=TimedCopies(stopwatch)) as offloader:
            engine = offloader.engine
            hooks: dict[str, Any] = {
                "attached": identity,
                "least": (least.pack, least.unpack),
                "hf_pyao": (engine.pack, engine.unpack),
            }
            for number in range(-NUM_WARM_UP, rounds // NUM_BLOCKS):
                for way, (pack, unpack) in hooks.items():
                    engine.pack, engine.unpack = pack, unpack
                    run(nullcontext())  # what ends with the next forward is its own
                    stopwatch.take()
                    elapsed_us = run(nullcontext()) - stopwatch.take()[0]
                    if number >= 0:
                        times[way].append(elapsed_us)
            mover = engine.mover
            mover.offload = stopwatch.timed(mover.offload)  # type: ignore[method-assign]
            mover.release = stopwatch.timed(mover.release)  # type: ignore[method-assign]
            mover.reload = stopwatch.timed(mover.reload)  # type: ignore[method-assign]
            for _ in range(rounds // NUM_BLOCKS):
                stopwatch.take()
                run(nullcontext())
                moving.append(stopwatch.take()[1])
            num_packs_before = engine.num_packs
            run(nullcontext())
            num_packs = engine.num_packs - num_packs_before
            num_slots = int(offloader.metrics()["num_slots"])
    per_tensor = {way: statistics.median(times[way]) / num_packs for way in WAYS}
    above = [t / num_packs - per_tensor["attached"] for t in times["hf_pyao"]]
    quartiles = statistics.quantiles(above, n=4)
    moving_us = statistics.median(moving) / num_packs
    return {
        "kind": kind,
        "identity_us": round(per_tensor["identity"] - per_tensor["none"], 3),
        "pack_and_unpack_us": round(quartiles[1] - moving_us, 3),
        "moving_us": round(moving_us, 3),
        "module_hooks_us": round(per_tensor["attached"] - per_tensor["identity"], 3),
        "all_us": round(quartiles[1] + per_tensor["attached"] - per_tensor["identity"], 3),
        "least_us": round(per_tensor["least"] - per_tensor["attached"], 3),
        "quartile_distance_us": round(quartiles[2] - quartiles[0], 3),
        "num_rounds": rounds,
        "num_saved_tensors": num_packs,
        "num_slots": num_slots,
    }


def costs_of_hooks(kind: str, length: int, rounds: int) -> list[float]:
    """Return the us per saved tensor above identity hooks, copies apart, of each of *rounds*."""
    is_model = kind in ("opt", "gpt2", "llama")
    model, inputs = layers_of(kind) if is_model else chain_of(kind, length)
    stopwatch = Stopwatch()

    def run() -> float:
        stopwatch.take()
        start = time.process_time()
        output = model(**inputs)
        output = output.logits if is_model else output
        output.backward(torch.ones_like(output))
        elapsed_us = (time.process_time() - start) * 1e6 - stopwatch.take()[0]
        model.zero_grad()
        return elapsed_us

    config = PyAOConfig(policy="all", min_bytes=MIN_BYTES[kind], keep_last_layers=0)
    costs: list[float] = []
    with attach(model, config, transport=TimedCopies(stopwatch)) as offloader:
        engine = offloader.engine
        own = engine.pack, engine.unpack
        identity = (lambda call, tensor: tensor), (lambda handle: handle)
        for number in range(-NUM_WARM_UP, rounds):
            engine.pack, engine.unpack = identity
            identity_us = [run(), run()][1]  # what ends with the next forward is its own
            engine.pack, engine.unpack = own
            before = engine.num_packs
            own_us = [run(), run()][1]
            num_packs = (engine.num_packs - before) / 2
            if number >= 0:
                costs.append((own_us - identity_us) / num_packs)
    return costs


def work() -> None:
    """Answer each line on standard input, the arguments of the function above, with its result."""
    for line in sys.stdin:
        print(json.dumps(costs_of_hooks(*json.loads(line))), flush=True)


def compare(other: Path, length: int, rounds: int) -> list[dict[str, float | str]]:
    """Measure this checkout's package and *other*'s in turns; return a row for each kind."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    here = Path(__file__).resolve().parents[2]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                subprocess.Popen(
                    command,
                    env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for checkout in (here, other)
        ]
        rows: list[dict[str, float | str]] = []
        for kind in MIN_BYTES:
            costs: tuple[list[float], list[float]] = ([], [])
            ratios: list[float] = []
            for turn in range(-(-rounds // ROUNDS_PER_TURN)):
                for index in (0, 1) if turn % 2 else (1, 0):
                    process = workers[index]
                    assert process.stdin is not None
                    assert process.stdout is not None
                    process.stdin.write(json.dumps([kind, length, ROUNDS_PER_TURN]) + "\n")
                    process.stdin.flush()
                    costs[index].extend(json.loads(process.stdout.readline()))
                ratios.append(
                    statistics.median(costs[0][-ROUNDS_PER_TURN:])
                    / statistics.median(costs[1][-ROUNDS_PER_TURN:])
                )
            now_us, before_us = (statistics.median(each) for each in costs)
            rows.append(
                {
                    "kind": kind,
                    "here_us": round(now_us, 3),
                    "against_us": round(before_us, 3),
                    "ratio": round(statistics.median(ratios), 3),
                    "num_rounds": len(costs[0]),
                }
            )
    return rows


COLUMNS = {
    "num_saved_tensors": "saved tensors",
    "pack_and_unpack_us": "pack + unpack",
    "moving_us": "moving",
    "module_hooks_us": "module hooks",
    "all_us": "all",
    "least_us": "least",
}


def main() -> None:
    """Measure, print a table, and write the result file if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=300, help="saved tensors a round (300)")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each way, in turns (40)")
    parser.add_argument("--result", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--against", type=Path, help="compare with the package in this checkout")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 2 * NUM_BLOCKS:
        parser.error(f"--rounds is {args.rounds}; expected {2 * NUM_BLOCKS} or more")
    torch.set_num_threads(1)
    # With other hooks in its place, the engine warns that nothing was saved.
    logging.getLogger("hf_pyao").setLevel(logging.ERROR)
    register_module_map("HookBenchStack", ModuleMap(layers=("layers",)))
    if args.worker:
        work()
        return
    if args.against is not None:
        if not (args.against / "hf_pyao" / "__init__.py").is_file():
            parser.error(f"--against is {args.against}; expected a checkout of hf_pyao")
        rows = compare(args.against, args.length, args.rounds)
        print("Microseconds per saved tensor above an identity hook, copies excluded:")
        titles = {"here_us": "here", "against_us": "against", "ratio": "ratio"}
        print(f"{'':<12}" + "".join(f"{title:>15}" for title in titles.values()))
        for row in rows:
            print(f"{row['kind']:<12}" + "".join(f"{row[column]:>15}" for column in titles))
        if args.result is not None:
            write_result(
                args.result, kind="hook_cost_comparison", schema_version=SCHEMA_VERSION, rows=rows
            )
        return
    rows = [measure(kind, args.length, args.rounds) for kind in MIN_BYTES]
    print("Microseconds per saved tensor above an identity hook, copies excluded:")
    print(f"{'':<12}" + "".join(f"{title:>15}" for title in COLUMNS.values()))
    for row in rows:
        print(f"{row['kind']:<12}" + "".join(f"{row[column]:>15}" for column in COLUMNS))
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
