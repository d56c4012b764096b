"""Train on sequences that do not fit otherwise, and see what each lever is for.

    python recipes/long_context.py
    python recipes/long_context.py --sequence_length 16384 --memory_gib 1.0
    python recipes/long_context.py --device cuda --sequence_length 131072 --hidden_size 2048 \\
        --intermediate_size 8192 --num_layers 16 --num_heads 32 --dtype bfloat16 --memory_gib 24

A Llama-shaped model with new weights reads the sources of Python's standard library, one sequence
at a time: without anything, with each of the four levers of `--activation_offload_long_context`
on top of those before, and with all but one. Each way runs in a process of its own. What is on the
device over the last step is drawn, `outputs/long_context/memory.png`; the table says which ways fit
into --memory_gib.

On a CPU the host stands in for the device. What tensors take is counted then, operation by
operation, as if the device had memory of its own; beside it stands what the process really held
(resident), where the offloaded copies lie in the same memory, so that only tiles and the chunked
loss show in it. On an accelerator the allocator counts, and --memory_gib caps it: what does not
fit fails, and the table says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from hf_pyao import PyAOConfig, attach
from hf_pyao.errors import ConfigError, PyAOError
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from hf_pyao.tools.bench.memory import DeviceMemory, pick_device
from memory_limit import RETURNS_MEMORY, resident_bytes_from_here_on, status_bytes
from result_file import write_result
from text_data import standard_library
from tokenization import special_ids, tokenize_with_own_bpe

GIB, MIB = 2**30, 2**20
SCHEMA_VERSION = 1
NUM_POINTS = 400
"""Points of a curve."""

LEVERS: dict[str, dict[str, Any]] = {
    "chunked loss": {"head_loss": "chunked"},
    "layer inputs leave": {"checkpoint_every": 1},
    "saved attention": {"save_attention": True},
    "tiled MLP": {"mlp_tiles": "auto"},
}
"""By name: what `long_context` sets, one by one."""

OFF: dict[str, Any] = {
    "head_loss": "off",
    "checkpoint_every": 0,
    "save_attention": False,
    "mlp_tiles": "off",
}

Row = dict[str, Any]


def ways() -> dict[str, dict[str, Any]]:
    """Return settings of ``PyAOConfig`` by name: the ladder from nothing to all levers, and all but
    each one. Empty settings: plain transformers."""
    names = list(LEVERS)
    chosen = {f"+ {name}": names[: index + 1] for index, name in enumerate(names)}
    chosen |= {f"all but {name}": [n for n in names if n != name] for name in names[:-1]}
    found: dict[str, dict[str, Any]] = {"nothing": {}}
    for way, levers in chosen.items():
        settings = {"keep_last_layers": 0, **OFF}
        for name in levers:
            settings |= LEVERS[name]
        runs_again = settings["checkpoint_every"] > 0
        settings["policy"] = "all" if runs_again else "off"
        settings["save_attention"] &= runs_again  # else no attention runs again
        found[way] = settings
    return found


def main() -> int:
    """Run every way, print the table, draw the curves; return the exit status."""
    args = _parse()
    if args.way is not None:
        print(json.dumps(run(args, ways()[args.way])))
        return 0
    try:
        rows = [
            {"name": name, "settings": settings, **_in_a_process(name, args)}
            for name, settings in tqdm(
                ways().items(), desc="ways", disable=not sys.stderr.isatty(), leave=False
            )
        ]
    except PyAOError as error:
        print(f"long_context.py: error: {error}", file=sys.stderr)
        return 2
    print(table(rows, args))
    _draw(rows, args)
    if args.result is not None:
        setup = {key: value for key, value in vars(args).items() if key not in ("result", "output")}
        write_result(
            args.result, kind="long_context", schema_version=SCHEMA_VERSION, setup=setup, rows=rows
        )
    return 0


def _in_a_process(name: str, args: argparse.Namespace) -> Row:
    """Run one way in a process of its own; return what it found, or how it failed."""
    options = [f"--{key}={value}" for key, value in vars(args).items() if value is not None]
    done = subprocess.run(
        [sys.executable, __file__, *options, f"--way={name}"],
        capture_output=True,
        text=True,
        env={**RETURNS_MEMORY, **os.environ},
        check=False,
    )
    if done.returncode == 0:
        found: Row = json.loads(done.stdout.strip().rpartition("\n")[2])
        return found
    if "OutOfMemoryError" in done.stderr:
        return {"failed": "out of memory"}
    lines = done.stderr.strip().splitlines() or ["it said nothing"]
    raise ConfigError(f"{name!r} ended with status {done.returncode}: {lines[-1]}")


# ---- one process ---------------------------------------------------------------------------------


def run(args: argparse.Namespace, settings: dict[str, Any]) -> Row:
    """Train for some steps; return what the last of them came to, bytes and milliseconds."""
    device = pick_device(args.device)
    model, text = _model_and_text(args)
    memory = DeviceMemory(device)
    if device.type != "cpu":
        memory.cap(args.memory_gib)
    model = model.to(device, getattr(torch, args.dtype))
    attached = attach(model, PyAOConfig.from_dict(settings)) if settings else None
    losses: list[float] = []
    with attached or contextlib.nullcontext() as offloader:
        for block in text.to(device):
            model.zero_grad(set_to_none=True)
            memory.reset_peaks()
            ledger = MemoryLedger(None if offloader is None else offloader.host_pool.owns)
            ledger.note([*model.parameters(), *model.buffers(), block])
            before_bytes = resident_bytes_from_here_on() if device.type == "cpu" else 0
            # Only the last step is shown: watching takes time.
            curve = _Curve(ledger)
            with curve if len(losses) == len(text) - 1 else contextlib.nullcontext():
                loss = model(input_ids=block, labels=block, use_cache=False).loss
                forward_ms = curve.now_ms()
                loss.backward()
                memory.synchronize()
                step_ms = curve.now_ms()
            losses.append(loss.item())
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(grads))
            with torch.no_grad():  # plain descent: no state of an optimizer beside what is shown
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.05 / max(norm, 1.0) * parameter.grad
            del loss
        totals = {} if offloader is None else offloader.totals()
        said = "" if offloader is None else offloader.describe()
    counted = memory.peak_allocated_bytes()
    return {
        "peak_bytes": ledger.peak_bytes if counted is None else counted,
        "resident_bytes": status_bytes("VmHWM") - before_bytes if before_bytes else None,
        "host_bytes": int(totals.get("host_peak_bytes", 0)),
        "curve": curve.highest_points(),
        "forward_ms": forward_ms,
        "step_ms": step_ms,
        "losses": losses,
        "gradient_norm": norm,
        "said": said,
    }


def _model_and_text(args: argparse.Namespace) -> tuple[Any, torch.Tensor]:
    """Return the model, and the text: shape (steps, 1, tokens)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer, tokens = tokenize_with_own_bpe(standard_library(2.0).documents, args.vocab_size)
    needed = args.sequence_length * args.num_steps
    text = torch.from_numpy(tokens.astype("int64"))
    text = text.repeat(-(-needed // len(text)))[:needed]
    torch.manual_seed(0)
    tokens_of_text: dict[str, Any] = {**special_ids(tokenizer), "vocab_size": len(tokenizer)}
    config = LlamaConfig(
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        num_key_value_heads=max(1, args.num_heads // 4),
        max_position_embeddings=args.sequence_length,
        **tokens_of_text,
    )
    return LlamaForCausalLM(config).train(), text.view(args.num_steps, 1, args.sequence_length)


class _Curve(NotingMode):
    """Notes the bytes that are alive after each operation, and when."""

    only_watches = True  # so that layers may run again under it

    def __init__(self, ledger: MemoryLedger) -> None:
        super().__init__(ledger)
        self.points: list[tuple[float, int]] = []
        self._start_s = time.perf_counter()

    def now_ms(self) -> float:
        return (time.perf_counter() - self._start_s) * 1e3

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.points.append((self.now_ms(), self.ledger.live_bytes))
        return result

    def highest_points(self) -> list[tuple[float, int]]:
        """Return at most :data:`NUM_POINTS` points: of each stretch of time the highest."""
        width_ms = max(self.points[-1][0], 1e-9) / NUM_POINTS
        highest: dict[int, tuple[float, int]] = {}
        for at_ms, nbytes in self.points:
            place = int(at_ms / width_ms)
            if place not in highest or nbytes > highest[place][1]:
                highest[place] = (round(at_ms, 2), nbytes)
        return [highest[place] for place in sorted(highest)]


# ---- what is shown -------------------------------------------------------------------------------


def table(rows: list[Row], args: argparse.Namespace) -> str:
    """Return the table, in plain text."""
    is_cpu = any(row.get("resident_bytes") is not None for row in rows)
    lines = [
        f"one sequence of {args.sequence_length:,} tokens, {args.num_layers} layers of "
        f"{args.hidden_size}, MLP {args.intermediate_size}, {args.dtype}, on {args.device}"
        + (": counted; host stands in for the device" if is_cpu else ""),
        f"{'':26} {'device':>10} {'resident':>10} {'host':>10} {'step':>9} {'loss':>8} "
        f"{'gradient':>9}  fits {args.memory_gib:g} GiB",
    ]
    return "\n".join([*lines, *(_line(row, args.memory_gib) for row in rows)])


def _line(row: Row, memory_gib: float) -> str:
    if "failed" in row:
        return f"{row['name']:26} {row['failed']}"
    resident = row["resident_bytes"]
    shown = "" if resident is None else f"{resident / MIB:,.0f} MiB"
    fits = "yes" if row["peak_bytes"] <= memory_gib * GIB else "no"
    return (
        f"{row['name']:26} {row['peak_bytes'] / MIB:>6,.0f} MiB {shown:>10} "
        f"{row['host_bytes'] / MIB:>6,.0f} MiB {row['step_ms'] / 1e3:>7.2f} s "
        f"{row['losses'][-1]:>8.4f} {row['gradient_norm']:>9.5f}  {fits}"
    )


def _draw(rows: list[Row], args: argparse.Namespace) -> None:
    """Draw what is on the device over the last step, for each way."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed: nothing is drawn (pip install 'hf_pyao[report]').")
        return
    from hf_pyao.tools.report.plots.data import NOTHING, OFFLOAD, WAITING
    from hf_pyao.tools.report.plots.look import BACK, INK, style

    shown = [row for row in rows if row.get("curve")]
    num_lines = -(-len(shown) // 2)
    figure = Figure(figsize=(11.0, 1.9 * num_lines), layout="constrained", facecolor=BACK)
    all_axes = list(figure.subplots(num_lines, 2, sharey=True, squeeze=False).flat)
    top, limit = max(row["peak_bytes"] for row in shown) / MIB, args.memory_gib * GIB / MIB
    for axes, row in zip(all_axes, shown, strict=False):
        style(axes)
        times_s = [at_ms / 1e3 for at_ms, _ in row["curve"]]
        sizes = [nbytes / MIB for _, nbytes in row["curve"]]
        axes.fill_between(times_s, sizes, color=OFFLOAD.colour, alpha=0.3, linewidth=0)
        axes.plot(times_s, sizes, color=OFFLOAD.colour, linewidth=1.0)
        if limit < 1.3 * top:
            axes.axhline(limit, color=WAITING.colour, linestyle="--", linewidth=1.0)
        axes.axvline(row["forward_ms"] / 1e3, color=NOTHING.colour, linewidth=0.8, alpha=0.5)
        axes.set_ylim(0, top * 1.1)
        axes.set_xlim(0, max(times_s[-1], 1e-9))
        title = f"{row['name']}: peak {row['peak_bytes'] / MIB:,.0f} MiB"
        axes.set_title(title, loc="left", fontsize=9, color=INK)
        axes.set_xlabel("seconds; the line: backward begins", fontsize=8)
        axes.set_ylabel("MiB", fontsize=8)
    for axes in all_axes[len(shown) :]:
        axes.set_axis_off()
    path = args.output / "memory.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    print(f"drawn in {path}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cpu", help="cpu, cuda, auto, ... (default: cpu)")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--sequence_length", type=int, default=4096, help="tokens (default: 4096)")
    add("--memory_gib", type=float, default=0.35, help="what the device has (default: 0.35)")
    add("--num_steps", type=int, default=2, help="the last is shown (default: 2)")
    add("--hidden_size", type=int, default=256)
    add("--intermediate_size", type=int, default=4096)
    add("--num_layers", type=int, default=3)
    add("--num_heads", type=int, default=4)
    add("--vocab_size", type=int, default=8192)
    add("--output", type=Path, default=Path("outputs/long_context"))
    add("--result", type=Path, help="write the figures to this JSON file")
    add("--way", choices=ways(), help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in ("sequence_length", "num_steps", "num_layers", "num_heads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; expected 1 or more")
    if args.hidden_size % args.num_heads:
        parser.error(f"--hidden_size {args.hidden_size} is no multiple of --num_heads")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
