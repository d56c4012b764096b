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
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from hf_pyao.errors import ConfigError, PyAOError
from hf_pyao.tools.report.plots.look import BACK, INK, style
from result_file import write_result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB, MIB = 2**30, 2**20
SCHEMA_VERSION = 1
WORKER = Path(__file__).parent / "studies" / "long_context_run.py"

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

BASE: dict[str, Any] = {"policy": "all", "keep_last_layers": 0}


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train."""

    name: str
    settings: dict[str, Any]
    """Of ``PyAOConfig``; empty: plain transformers."""
    is_rung: bool
    """One more lever than the way before; else one less than all."""


def ways() -> list[Way]:
    """Return the ladder from nothing to all levers, and all but each one."""
    found = [Way(name="nothing", settings={}, is_rung=True)]
    settings = {**BASE, **OFF, "policy": "off"}
    for name, lever in LEVERS.items():
        settings = {**settings, **lever}
        if settings["checkpoint_every"]:
            settings["policy"] = BASE["policy"]
        found.append(Way(name=f"+ {name}", settings=dict(settings), is_rung=True))
    for name, lever in list(LEVERS.items())[:-1]:
        without = {**settings, **{key: OFF[key] for key in lever}}
        if not without["checkpoint_every"]:
            without["save_attention"] = False
            without["policy"] = "off"
        found.append(Way(name=f"all but {name}", settings=without, is_rung=False))
    return found


def main() -> int:
    """Run every way, print the table, draw the curves; return the exit status."""
    args = _parse()
    try:
        rows = [
            {"name": way.name, "is_rung": way.is_rung, "settings": way.settings, **_run(way, args)}
            for way in tqdm(ways(), desc="ways", disable=not sys.stderr.isatty(), leave=False)
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


def _run(way: Way, args: argparse.Namespace) -> dict[str, Any]:
    """Run one way in a process of its own; return what it found, or how it failed."""
    request = {
        "settings": way.settings,
        "device": args.device,
        "dtype": args.dtype,
        "memory_gib": args.memory_gib,
        "sequence_length": args.sequence_length,
        "num_steps": args.num_steps,
        "model": {
            "vocab_size": args.vocab_size,
            "hidden_size": args.hidden_size,
            "intermediate_size": args.intermediate_size,
            "num_hidden_layers": args.num_layers,
            "num_attention_heads": args.num_heads,
            "num_key_value_heads": max(1, args.num_heads // 4),
        },
    }
    # What is freed goes back to the system at once: else the resident memory says little.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", **os.environ}
    done = subprocess.run(
        [sys.executable, str(WORKER)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(last)
        return found
    lines = done.stderr.strip().splitlines() or ["it said nothing"]
    if "OutOfMemoryError" in done.stderr:
        return {"failed": "out of memory"}
    raise ConfigError(f"{way.name!r} ended with status {done.returncode}: {lines[-1]}")


def table(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Return the table, in plain text."""
    is_cpu = any(row.get("resident_bytes") is not None for row in rows)
    lines = [
        f"one sequence of {args.sequence_length:,} tokens, {args.num_layers} layers of "
        f"{args.hidden_size}, MLP {args.intermediate_size}, {args.dtype}, on {args.device}"
        + (": counted; host stands in for the device" if is_cpu else ""),
        f"{'':24} {'device':>10} {'resident':>10} {'host':>10} {'step':>9} {'loss':>8} "
        f"{'gradient':>9}  fits {args.memory_gib:g} GiB",
    ]
    for row in rows:
        if not row["is_rung"] and rows[rows.index(row) - 1]["is_rung"]:
            lines.append("")
        lines.append(_line(row, args.memory_gib))
    return "\n".join(lines)


def _line(row: dict[str, Any], memory_gib: float) -> str:
    if "failed" in row:
        return f"{row['name']:24} {row['failed']}"
    resident = row["resident_bytes"]
    shown = "" if resident is None else f"{resident / MIB:,.0f} MiB"
    fits = "yes" if row["peak_bytes"] <= memory_gib * GIB else "no"
    return (
        f"{row['name']:24} {row['peak_bytes'] / MIB:>6,.0f} MiB {shown:>10} "
        f"{row['host_bytes'] / MIB:>6,.0f} MiB {row['step_ms'] / 1e3:>7.2f} s "
        f"{row['losses'][-1]:>8.4f} {row['gradient_norm']:>9.5f}  {fits}"
    )


def _draw(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    try:
        figure = figure_of(rows, args)
    except ImportError:
        print("matplotlib is not installed: nothing is drawn (pip install 'hf_pyao[report]').")
        return
    path = args.output / "memory.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    print(f"drawn in {path}")


def figure_of(rows: list[dict[str, Any]], args: argparse.Namespace) -> Figure:
    """Return the plot: what is on the device over the last step, for each way."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.get("curve")]
    figure = Figure(figsize=(11.0, 1.9 * -(-len(shown) // 2)), layout="constrained", facecolor=BACK)
    all_axes = figure.subplots(-(-len(shown) // 2), 2, sharey=True, squeeze=False).flat
    top = max(row["peak_bytes"] for row in shown) / MIB
    for axes, row in zip(all_axes, shown, strict=False):
        _draw_way(axes, row, top, args.memory_gib)
    for axes in list(all_axes)[len(shown) :]:
        axes.set_axis_off()
    return figure


def _draw_way(axes: Axes, row: dict[str, Any], top: float, memory_gib: float) -> None:
    from hf_pyao.tools.report.plots.data import NOTHING, OFFLOAD, WAITING

    style(axes)
    times_s = [at_ms / 1e3 for at_ms, _ in row["curve"]]
    sizes = [nbytes / MIB for _, nbytes in row["curve"]]
    axes.fill_between(times_s, sizes, color=OFFLOAD.colour, alpha=0.3, linewidth=0)
    axes.plot(times_s, sizes, color=OFFLOAD.colour, linewidth=1.0)
    limit = memory_gib * GIB / MIB
    if limit < 1.3 * top:
        axes.axhline(limit, color=WAITING.colour, linestyle="--", linewidth=1.0)
    axes.axvline(row["forward_ms"] / 1e3, color=NOTHING.colour, linewidth=0.8, alpha=0.5)
    axes.set_ylim(0, top * 1.1)
    axes.set_xlim(0, max(times_s[-1], 1e-9))
    title = f"{row['name']}: peak {row['peak_bytes'] / MIB:,.0f} MiB"
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.set_xlabel("seconds; the line: backward begins", fontsize=8)
    axes.set_ylabel("MiB", fontsize=8)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, auto, ... (default: cpu)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--sequence_length", type=int, default=4096, help="tokens (default: 4096)")
    parser.add_argument(
        "--memory_gib", type=float, default=0.35, help="what the device has (default: 0.35)"
    )
    parser.add_argument("--num_steps", type=int, default=2, help="the last is shown (default: 2)")
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--intermediate_size", type=int, default=4096)
    parser.add_argument("--num_layers", type=int, default=3)
    parser.add_argument("--num_heads", type=int, default=4)
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--output", type=Path, default=Path("outputs/long_context"))
    parser.add_argument("--result", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    for name in ("sequence_length", "num_steps", "num_layers", "num_heads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; expected 1 or more")
    if args.hidden_size % args.num_heads:
        parser.error(f"--hidden_size {args.hidden_size} is no multiple of --num_heads")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
