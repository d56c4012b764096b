"""Saved tensors on a disk: resident memory of the process and time of a step, with and without.

    python recipes/disk_activations.py --disk_path /mnt/nvme/pyao
    python recipes/disk_activations.py --disk_path /mnt/nvme/pyao --activations_gib 4 --num_steps 5
    python recipes/disk_activations.py --disk_path /mnt/nvme/pyao --smoke

A Llama-shaped model with new weights trains a few steps in a process of its own: once as it is,
and once with `disk_path` and no host memory for saved tensors, so that they all go to the disk. On
a CPU the host stands in for the device. The kernel counts the process's resident memory (VmHWM in
/proc/self/status). Losses and gradients of both runs have to have equal bits.

Several shapes are run with equal bytes of saved tensors. The more a layer computes for each byte
that it saves, the less the disk costs: each row states that ratio, in FLOPs a byte. A small hidden
size loses. What still grows with a disk is the memory in front of it and what one layer computes
with, so that more layers save more.

Both processes run in turns, --num_rounds times, and times are medians of these rounds. The step is
predicted as policy `auto` predicts it: from the plain step, and from the speeds of copies and of
the disk in one step of a quarter of the batch, which each process runs first. On a CPU copies stand
in the way of compute.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.stores.disk_figures import DiskFigures
from hf_pyao.engine.stores.disk_store import DiskStore
from hf_pyao.plan.hardware.speeds import DiskModel, LinkModel
from hf_pyao.plan.predict.disk_demand import DiskDemand, passes_ms
from memory_limit import RETURNS_MEMORY, resident_bytes_from_here_on, status_bytes
from result_file import write_result

MIB, GIB = 2**20, 2**30
SCHEMA_VERSION = 2
WINDOW_BYTES = 16 * MIB
LENGTH = 256
BYTES_A_TOKEN = 78
"""Bytes that a layer saves, a token and a hidden unit, about: how many tokens make the bytes asked
for. The rows have what was counted."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What a process came to."""

    digest: str
    """Of losses and gradients."""
    grown_bytes: int
    """Most resident memory in all steps, less what was resident before."""
    forward_ms: float
    backward_ms: float
    cpu_ms: float
    """Processor time of a step, user and system."""
    num_tokens: int
    written_bytes: int = 0
    """Of a step, as the following."""
    read_bytes: int = 0
    forwarded_bytes: int = 0
    stall_ms: float = 0.0
    write_gib_per_s: float = 0.0
    """While the disk was written: measured in the step that came first, as the following."""
    read_gib_per_s: float = 0.0
    d2h_gib_per_s: float = 0.0
    """Of copies to the memory in front of the disk."""
    h2d_gib_per_s: float = 0.0
    is_direct: bool = False

    @property
    def step_ms(self) -> float:
        return self.forward_ms + self.backward_ms


def main(argv: list[str] | None = None) -> int:
    """Run the recipe; return 0 if all bits are equal."""
    args = _parser().parse_args(argv)
    if args.smoke:
        args.activations_gib, args.num_steps, args.shapes = 0.02, 2, ["64x8"]
        args.num_rounds = 1
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
    if args.arm:
        print(json.dumps(asdict(_arm(args, *shapes[0], on_disk=args.arm == "disk"))))
        return 0
    load_before = os.getloadavg()[0]
    rows = [_row(args, *shape) for shape in shapes]
    for row in rows:
        print(_line(row))
    if args.result is not None:
        write_result(
            args.result,
            kind="disk_activations",
            schema_version=SCHEMA_VERSION,
            activations_gib=args.activations_gib,
            num_steps=args.num_steps,
            load_average=[load_before, os.getloadavg()[0]],
            num_rounds=args.num_rounds,
            rows=rows,
        )
    return 0 if all(row["has_equal_bits"] for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--disk_path", required=True, help="a directory on a local disk")
    parser.add_argument("--activations_gib", type=float, default=2.5)
    parser.add_argument("--num_steps", type=int, default=1)
    parser.add_argument("--num_rounds", type=int, default=3)
    parser.add_argument(
        "--shapes", nargs="+", default=["1024x16", "1024x8", "128x16"], help="hidden size x layers"
    )
    parser.add_argument("--result", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it runs")
    parser.add_argument("--arm", choices=["plain", "disk"], help=argparse.SUPPRESS)
    return parser


def _row(args: argparse.Namespace, hidden_size: int, num_layers: int) -> dict[str, Any]:
    """Run both processes of a shape in turns; return what they came to."""
    runs: dict[str, list[Arm]] = {"plain": [], "disk": []}
    for number in range(args.num_rounds):
        for arm in ("plain", "disk") if number % 2 == 0 else ("disk", "plain"):
            runs[arm].append(_process(args, f"{hidden_size}x{num_layers}", arm))
    plain, disk = (_median_of(runs[arm]) for arm in ("plain", "disk"))
    moved_bytes = disk.written_bytes or 1
    predicted_ms = _predicted_ms(plain, disk)
    return {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "has_equal_bits": len({each.digest for found in runs.values() for each in found}) == 1,
        "flops_per_byte": _step_flops(hidden_size, num_layers, plain.num_tokens) / moved_bytes,
        "growth_ratio": disk.grown_bytes / plain.grown_bytes,
        "step_ratio": disk.step_ms / plain.step_ms,
        "step_ratios": [
            disk.step_ms / plain.step_ms
            for plain, disk in zip(runs["plain"], runs["disk"], strict=True)
        ],
        "predicted_step_ratio": predicted_ms / plain.step_ms,
        "plain": asdict(plain),
        "disk": asdict(disk),
    }


def _median_of(runs: Sequence[Arm]) -> Arm:
    """Return what the processes of one arm came to: the most memory, and medians of the rest."""
    medians = {
        name: statistics.median_low([getattr(each, name) for each in runs])
        for name, value in asdict(runs[0]).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    medians["grown_bytes"] = max(each.grown_bytes for each in runs)
    return replace(runs[0], **medians)


def _predicted_ms(plain: Arm, disk: Arm) -> float:
    if not disk.write_gib_per_s:
        return plain.step_ms
    read_gib_per_s = disk.read_gib_per_s or disk.write_gib_per_s  # memory may have had all of it
    model = DiskModel(
        write_gib_per_s=disk.write_gib_per_s, read_gib_per_s=read_gib_per_s, host_bytes=0
    )
    return sum(
        passes_ms(
            forward_ms=plain.forward_ms,
            backward_ms=plain.backward_ms,
            link=LinkModel(
                d2h_gib_per_s=disk.d2h_gib_per_s, h2d_gib_per_s=disk.h2d_gib_per_s, disk=model
            ),
            offloaded_bytes=disk.written_bytes,
            demand=DiskDemand(saved_bytes=disk.written_bytes),
        )
    )


def _process(args: argparse.Namespace, shape: str, arm: str) -> Arm:
    command = [sys.executable, __file__, "--arm", arm, "--disk_path", args.disk_path]
    command += ["--activations_gib", str(args.activations_gib), "--num_steps", str(args.num_steps)]
    command += ["--shapes", shape]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | RETURNS_MEMORY
    )
    return Arm(**json.loads(done.stdout.splitlines()[-1]))


def _line(row: dict[str, Any]) -> str:
    bits = "equal bits" if row["has_equal_bits"] else "OTHER BITS"
    return (
        f"hidden size {row['hidden_size']}, {row['num_layers']} layers "
        f"({row['flops_per_byte']:,.0f} FLOPs a byte written): "
        f"resident growth {row['disk']['grown_bytes'] / GIB:.2f} of "
        f"{row['plain']['grown_bytes'] / GIB:.2f} GiB ({row['growth_ratio'] - 1:+.0%}), step "
        f"{row['step_ratio']:.2f}x, predicted {row['predicted_step_ratio']:.2f}x, disk "
        f"{row['disk']['write_gib_per_s']:.2f} / {row['disk']['read_gib_per_s']:.2f} GiB/s, {bits}"
    )


def _step_flops(hidden_size: int, num_layers: int, num_tokens: int) -> float:
    """Return the FLOPs of the products of a step's layers, forward and backward."""
    weights = 4 * hidden_size**2 + 3 * hidden_size * 4 * hidden_size
    return 6.0 * num_tokens * num_layers * weights


# ---- one process ------------------------------------------------------------------------------


def _arm(args: argparse.Namespace, hidden_size: int, num_layers: int, *, on_disk: bool) -> Arm:
    """Train in this process; return what it came to."""
    model = _model(hidden_size, num_layers)
    wanted = args.activations_gib * GIB / (BYTES_A_TOKEN * hidden_size * num_layers)
    batch_size = max(1, round(wanted / LENGTH))
    config = PyAOConfig(policy="off")
    if on_disk:
        config = PyAOConfig(
            policy="all",
            window=WINDOW_BYTES,
            host_memory_gib=0.0,
            disk_path=args.disk_path,
            disk_gib=4 * args.activations_gib,
            keep_last_layers=0,
        )
    with attach(model, config) as offloader:
        _step(model, _ids(1, 0)[:, :16])  # gradients, threads and code are there
        store = next((s for s in offloader.link.tiers.stores if isinstance(s, DiskStore)), None)
        resident_bytes = resident_bytes_from_here_on()
        _step(model, _ids(max(1, batch_size // 4), args.num_steps))
        model.zero_grad(set_to_none=False)
        first = DiskFigures() if store is None else store.figures.copy()
        copies = offloader.link.transport.bandwidth()
        digest, times_ms = hashlib.sha256(), [0.0, 0.0]
        began_ms = _cpu_ms()
        for seed in range(args.num_steps):
            loss, forward_ms, backward_ms = _step(model, _ids(batch_size, seed))
            digest.update(str(loss).encode())
            times_ms = [times_ms[0] + forward_ms, times_ms[1] + backward_ms]
        cpu_ms = (_cpu_ms() - began_ms) / args.num_steps
        grown_bytes = status_bytes("VmHWM") - resident_bytes
        figures = DiskFigures() if store is None else store.figures.since(first)
    for parameter in model.parameters():
        if parameter.grad is not None:
            digest.update(parameter.grad.numpy().tobytes())
    num_steps = args.num_steps
    return Arm(
        digest=digest.hexdigest(),
        grown_bytes=grown_bytes,
        forward_ms=times_ms[0] / num_steps,
        backward_ms=times_ms[1] / num_steps,
        cpu_ms=cpu_ms,
        num_tokens=batch_size * LENGTH,
        written_bytes=figures.written_bytes // num_steps,
        read_bytes=figures.read_bytes // num_steps,
        forwarded_bytes=figures.forwarded_bytes // num_steps,
        stall_ms=figures.stall_ms / num_steps,
        write_gib_per_s=first.write_gib_per_s or 0.0,
        read_gib_per_s=first.read_gib_per_s or 0.0,
        d2h_gib_per_s=copies.d2h_gib_per_s or 0.0,
        h2d_gib_per_s=copies.h2d_gib_per_s or 0.0,
        is_direct=store is not None and store.file.is_direct,
    )


def _model(hidden_size: int, num_layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=max(1, hidden_size // 64),
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config).train()


def _ids(batch_size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (batch_size, LENGTH), generator=generator)


def _step(model: Any, ids: torch.Tensor) -> tuple[float, float, float]:
    """Return the loss, and the time of forward and of backward in ms."""
    began_s = time.perf_counter()
    loss = model(input_ids=ids, labels=ids).loss
    half_s = time.perf_counter()
    loss.backward()
    end_s = time.perf_counter()
    return loss.item(), 1e3 * (half_s - began_s), 1e3 * (end_s - half_s)


def _cpu_ms() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return 1e3 * (used.ru_utime + used.ru_stime)


if __name__ == "__main__":
    sys.path.insert(0, os.fspath(Path(__file__).parent))
    sys.exit(main())
