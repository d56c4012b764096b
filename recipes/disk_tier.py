"""Train adapters on a model whose frozen weights are on a disk, under a memory limit.

    python recipes/disk_tier.py --folder /mnt/nvme
    python recipes/disk_tier.py --folder /mnt/nvme --memory_limit_gib 4 --hidden_size 2048 \\
        --num_layers 60

A checkpoint of a Llama-shaped model with random weights is written to the folder, layer by layer. A
child process whose memory the kernel limits (a cgroup; the weights are --times_larger of it) loads
it, adds LoRA adapters, and trains: the frozen weights that do not fit --host_memory_gib are read
from the disk, ahead of their use (`disk_path`). Another child, without the limit and without
hf_pyao, does the same steps: losses and adapters have to have equal bits. In the first child, after
training, forwards without gradients alternate with reads of the same file, made as `pyao doctor
--disk` makes its own: how much of that raw speed the ring reaches. Where no cgroup can be made, the
resident memory of the process and the page cache of its files are counted instead, and that is
said.

Needs peft: `pip install peft`, and Linux.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.errors import PyAOError
from memory_limit import cached_bytes, drop_from_cache, limited_to, run_in, status_bytes
from result_file import write_result

GIB, MIB = 2**30, 2**20
SCHEMA_VERSION = 2
LEAST_SHARE = 0.8
"""Of the disk's raw speed, which the ring is to reach where the disk is what it waits for."""


def main(argv: list[str] | None = None) -> int:
    """Run the recipe; return 0 if bits are equal and the limit holds."""
    args = _parser().parse_args(argv)
    if args.smoke:
        args.hidden_size, args.num_layers, args.vocab_size = 256, 8, 300
        args.sequence_length, args.num_steps, args.num_rounds = 16, 2, 1
        args.memory_limit_gib, args.host_memory_gib, args.sample_mib = 0.0, 0.008, 16
    try:
        if args.child is not None:
            print(json.dumps({"trained": train, "resident": train}[args.child](args)))
            return 0
        return run(args)
    except PyAOError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint, train with and without the limit, print and write the result."""
    root = Path(args.folder) / "disk_tier"
    checkpoint = root / "checkpoint"
    load_before = os.getloadavg()[0]
    try:
        weights_bytes = write_checkpoint(args, checkpoint)
        limit_bytes = int(args.memory_limit_gib * GIB) or int(weights_bytes / args.times_larger)
        if args.smoke:
            limit_bytes = 4 * GIB  # the interpreter alone takes more than three times its weights
        with limited_to(limit_bytes) as group:
            limited = child(args, "trained", group)
            peak_bytes = None if group is None else group.peak_bytes()
            killed = None if group is None else group.num_killed()
        resident = child(args, "resident", None)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if limited is None or resident is None:
        print("error: a child process ended early", file=sys.stderr)
        return 1
    is_equal = all(limited[each] == resident[each] for each in ("losses", "adapters"))
    speeds = [row["ring_gib_per_s"] / row["raw_gib_per_s"] for row in limited["rounds"]]
    share = statistics.median(speeds)
    say(
        "frozen weights",
        f"{weights_bytes / GIB:.2f} GiB, {weights_bytes / limit_bytes:.2f} x limit",
    )
    say("memory limit", f"{limit_bytes / GIB:.2f} GiB")
    if peak_bytes is None:
        say("no cgroup could be made; resident and page cache", _counted(limited))
    else:
        say("charged by the kernel, at most", f"{peak_bytes / GIB:.2f} GiB, {killed or 0} killed")
    say("resident of its own, with and without", " and ".join(map(_anonymous, (limited, resident))))
    say("reads bypass the page cache (O_DIRECT)", str(limited["is_direct"]))
    say("read a step", f"{limited['read_bytes_per_step'] / GIB:.2f} GiB")
    say("in flight, at most", f"{limited['staging_bytes'] / MIB:.1f} MiB")
    say("bits of losses and adapters, against resident", "equal" if is_equal else "DIFFER")
    say("time of a step", f"{limited['step_s']:.1f} s, resident {resident['step_s']:.1f} s")
    say("checksums", f"{limited['check_s_per_gib']:.2f} s of threads for each GiB")
    say("of the raw cold speed", f"{share:.0%} ({', '.join(f'{each:.0%}' for each in speeds)})")
    if args.output is not None:
        write_result(
            args.output,
            kind="disk_tier_weights",
            schema_version=SCHEMA_VERSION,
            arguments={k: str(v) for k, v in vars(args).items()},
            weights_bytes=weights_bytes,
            limit_bytes=limit_bytes,
            has_cgroup=peak_bytes is not None,
            charged_peak_bytes=peak_bytes,
            killed=killed,
            load_average=[load_before, os.getloadavg()[0]],
            bits_are_equal=is_equal,
            share_of_raw_speed=share,
            limited=limited,
            resident=resident,
        )
    return 0 if is_equal and limited["is_within"] and (args.smoke or share >= LEAST_SHARE) else 1


def say(what: str, figure: str) -> None:
    """Print one line of the table."""
    print(f"{what:52}{figure}")


def child(args: argparse.Namespace, what: str, group: Any) -> dict[str, Any] | None:
    """Run this recipe as a child process, and return what it found; None: it ended early."""
    options = [
        f"--{name}={value}"
        for name, value in vars(args).items()
        if name not in ("child", "output", "smoke") and value is not None
    ]
    done = run_in(group, [sys.executable, __file__, f"--child={what}", *options])
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        print(f"the {what} child ended with {done.returncode}", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def write_checkpoint(args: argparse.Namespace, folder: Path) -> int:
    """Write a checkpoint, one file a layer; return the bytes of the layers' matrices."""
    from accelerate import init_empty_weights
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(_config(args), dtype=torch.float32)
    torch.manual_seed(args.seed)
    files: dict[str, str] = {}
    groups: dict[str, dict[str, torch.Size]] = {}
    for name, tensor in model.state_dict().items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "ends"
        groups.setdefault(layer, {})[name] = tensor.shape
    total = weights = 0
    for number, (_, shapes) in enumerate(groups.items()):
        tensors = {name: _new(shape, args.hidden_size) for name, shape in shapes.items()}
        file = f"model-{number + 1:05}-of-{len(groups):05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
        total += sum(each.nbytes for each in tensors.values())
        if len(shapes) > 3:
            weights += sum(each.nbytes for each in tensors.values() if each.dim() > 1)
        drop_from_cache(folder / file)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model.config.save_pretrained(folder)
    return weights


def _new(shape: torch.Size, hidden_size: int) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape)
    return torch.randn(shape) / hidden_size**0.5


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, and say what it came to; with frozen weights on the disk, or all resident."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    root = Path(args.folder) / "disk_tier"
    base = AutoModelForCausalLM.from_pretrained(root / "checkpoint", dtype=torch.float32)
    base.config.use_cache = False
    torch.manual_seed(args.seed)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0))
    model.train()
    if args.child == "resident":
        return steps(args, model, None)
    settings = PyAOConfig(
        policy="off",
        stream_weights=0,
        stream_embeddings="off",
        host_memory_gib=args.host_memory_gib,
        disk_path=root / "disk",
        disk_gib=0,
    )
    with attach(model, settings) as offloader:
        print(offloader.describe(), file=sys.stderr)
        found = steps(args, model, offloader)
        return found | {"rounds": compare_speeds(args, model, offloader, root / "disk")}


def steps(args: argparse.Namespace, model: Any, offloader: Any) -> dict[str, Any]:
    """Return losses and adapters of a few steps, and memory and time meanwhile."""
    generator = torch.Generator().manual_seed(args.seed)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-3)
    losses, seconds, memory = [], [], []
    for _ in range(args.num_steps):
        ids = torch.randint(args.vocab_size, (1, args.sequence_length), generator=generator)
        before, began = _read_bytes(offloader), time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item().hex())
        resident = {name: status_bytes(name) for name in ("RssAnon", "RssFile")}
        memory.append(resident | {"read_bytes": _read_bytes(offloader) - before})
    digest = hashlib.sha256()
    for parameter in trained.values():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    found = {
        "losses": losses,
        "adapters": digest.hexdigest(),
        "step_s": statistics.median(seconds),
        "memory": memory,
    }
    if offloader is None:
        return found
    figures = offloader.weights.figures()
    blocks = offloader.weights.ring.blocks
    files = {each.masters.in_file.file for each in blocks if each.masters.in_file is not None}
    (file,) = files
    cached = cached_bytes(file.path)
    return found | {
        "is_direct": _is_direct(file),
        "cached_bytes_of_file": cached,
        "staging_bytes": figures["staging_bytes"],
        "num_disk_blocks": sum(each.masters.in_file is not None for each in blocks),
        "num_blocks": len(blocks),
        "read_bytes_per_step": statistics.median(row["read_bytes"] for row in memory),
        "check_s_per_gib": figures["disk_check_ms"] / 1e3 / (figures["disk_read_bytes"] / GIB),
        "retries": figures["num_disk_retries"],
        "is_within": figures["staging_bytes"] <= 512 * MIB,
    }


def compare_speeds(
    args: argparse.Namespace, model: Any, offloader: Any, folder: Path
) -> list[dict[str, float]]:
    """Alternate raw reads of the file and forwards of one token, which wait for the disk.

    Both read the same bytes past the page cache, one after the other, in an order that changes from
    round to round.
    """
    from hf_pyao.engine.stores.disk_speed import measure_disk, measure_reads

    ids = torch.zeros((1, 1), dtype=torch.int64)
    (file,) = {
        each.masters.in_file.file
        for each in offloader.weights.ring.blocks
        if each.masters.in_file is not None
    }
    of_doctor = measure_disk(folder, "--folder", args.sample_mib * MIB)

    def of_ring() -> tuple[float, float]:
        """Return the speed, and the processor time of all threads for each GiB."""
        before, began, used = _read_bytes(offloader), time.perf_counter(), time.process_time()
        with torch.no_grad():
            model(input_ids=ids)
        elapsed_s, used_s = time.perf_counter() - began, time.process_time() - used
        gib = (_read_bytes(offloader) - before) / GIB
        return gib / elapsed_s, used_s / gib

    rows = []
    for number in range(args.num_rounds):
        row = {
            "doctor_read_gib_per_s": of_doctor.read_gib_per_s,
            "doctor_write_gib_per_s": of_doctor.write_gib_per_s,
        }
        for arm in ("raw", "ring") if number % 2 else ("ring", "raw"):
            if arm == "raw":
                row["raw_gib_per_s"] = measure_reads(file.path, 2**50)
            else:
                row["ring_gib_per_s"], row["ring_cpu_s_per_gib"] = of_ring()
        rows.append(row)
    return rows


def _read_bytes(offloader: Any) -> int:
    if offloader is None:
        return 0
    read: int = offloader.weights.figures()["disk_read_bytes"]
    return read


def _is_direct(file: Any) -> bool:
    """Say whether reads bypass the page cache, by the flags that the kernel has of the file."""
    from hf_pyao.engine.stores.disk_files import is_direct

    return is_direct(file.descriptor)


def _anonymous(found: dict[str, Any]) -> str:
    return f"{max(row['RssAnon'] for row in found['memory']) / GIB:.2f} GiB"


def _counted(found: dict[str, Any]) -> str:
    resident = max(row["RssAnon"] + row["RssFile"] for row in found["memory"])
    return f"{(resident + found['cached_bytes_of_file']) / GIB:.2f} GiB"


def _config(args: argparse.Namespace) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 8 // 3 // 64 * 64,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.hidden_size // 64,
        num_key_value_heads=args.hidden_size // 64,
        vocab_size=args.vocab_size,
        tie_word_embeddings=False,
        use_cache=False,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--folder", required=True, help="a folder on the disk; what is written is removed again")
    add("--hidden_size", type=int, default=1536)
    add("--num_layers", type=int, default=32)
    add("--vocab_size", type=int, default=2048)
    add("--sequence_length", type=int, default=32)
    add("--num_steps", type=int, default=3)
    add("--num_rounds", type=int, default=9, help="of the comparison with the raw speed")
    add("--times_larger", type=float, default=3.0, help="the weights, than the memory limit")
    add("--memory_limit_gib", type=float, default=0.0, help="0: by --times_larger")
    add("--host_memory_gib", type=float, default=0.2, help="for weights, and what is read ahead")
    add("--sample_mib", type=int, default=1024, help="for the raw speed")
    add("--seed", type=int, default=0)
    add("--smoke", action="store_true", help="a small model, in seconds")
    add("--child", choices=("trained", "resident"), help=argparse.SUPPRESS)
    add("-o", "--output", help="write the result here")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
