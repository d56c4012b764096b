"""Count what autograd saves in the paper's models, and what stays with offloading, without a GPU.

    python recipes/studies/count_bytes.py
    python recipes/studies/count_bytes.py --model llama:1.2b --micro_batch 1 4 16 --result out.json
    python recipes/studies/count_bytes.py --autocast --micro_batch 4

Models are built from their configs on fake tensors: no memory is taken, no arithmetic is done, and
the engine runs as it does in training. The bytes are exact for the operations that this machine's
build of torch picks. Dropout is off: with it, attention on a CPU saves a matrix of sequence length
squared, which CUDA's does not. A figure from here is a count on a CPU, not a measurement of a GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_pyao import PyAOConfig, attach
from hf_pyao.tools.estimate.model_sizes import PAPER_SIZES, build_config, find_size

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from result_file import write_result

GIB = 2**30
SCHEMA_VERSION = 1
_DROPOUTS = ("dropout", "attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop")


def main() -> None:
    """Count and print a table; write the figures if asked to."""
    args = _parse()
    rows = []
    print("| model | size | autograd holds | with hf_pyao | moved | outside the layers | equal |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for spec in args.model:
        architecture, _, size = spec.partition(":")
        for micro_batch in args.micro_batch:
            row = count(architecture, size, micro_batch, args.sequence_length, args.autocast)
            rows.append(row)
            print(_line(row), flush=True)
    if args.result is not None:
        write_result(
            args.result,
            kind="count_bytes",
            schema_version=SCHEMA_VERSION,
            rows=rows,
        )


def count(
    architecture: str, size: str, micro_batch: int, sequence_length: int, is_autocast: bool = False
) -> dict[str, Any]:
    """Run forward and backward on fake tensors and return the counted bytes.

    In bfloat16, or with float32 weights under bfloat16 autocast.

    Returns ``would_hold_bytes``, ``held_bytes``, ``kept_bytes/...``, ``offloaded_bytes``,
    ``duplicate_bytes`` of the layers, and ``outside_bytes``, which autograd saves outside of them
    (head and loss).
    """
    from transformers import AutoModelForCausalLM

    config = build_config(architecture, find_size(architecture, size))
    config.use_cache = False
    for name in _DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        dtype = torch.float32 if is_autocast else torch.bfloat16
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        ids = torch.randint(0, config.vocab_size, (micro_batch, sequence_length))
        seen: dict[int, int] = {}
        parameters = {p.untyped_storage()._cdata for p in model.parameters()}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in parameters:
                seen[storage._cdata] = storage.nbytes()
            return tensor

        with attach(model, PyAOConfig(policy="all", host_memory_gib=4096)) as offloader:
            # Hooks outside of ours: they see what is saved between and behind the layers.
            with (
                torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
                torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast),
            ):
                loss = model(input_ids=ids, labels=ids).loss
            outside_bytes = sum(seen.values())
            loss.backward()
            figures = offloader.metrics()
    counted = ("would_hold_bytes", "held_bytes", "offloaded_bytes", "duplicate_bytes")
    return {
        "model": f"{architecture}-{size}",
        "micro_batch": micro_batch,
        "sequence_length": sequence_length,
        "dtype": "bfloat16 autocast" if is_autocast else "bfloat16",
        "outside_bytes": outside_bytes,
        **{key: int(value) for key, value in figures.items() if key.startswith(counted)},
        **{key: int(value) for key, value in figures.items() if key.startswith("kept_bytes/")},
    }


def _line(row: dict[str, Any]) -> str:
    would, held = row["would_hold_bytes"] / GIB, row["held_bytes"] / GIB
    return (
        f"| {row['model']:<10} | {row['micro_batch']:>3} x {row['sequence_length']} "
        f"| {would:7.2f} GiB | {held:6.2f} GiB | {row['offloaded_bytes'] / GIB:7.2f} GiB "
        f"| {row['outside_bytes'] / GIB:6.2f} GiB | {row['duplicate_bytes'] / GIB:6.2f} GiB |"
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = [f"{architecture}:{size}" for architecture, size in PAPER_SIZES.items()]
    parser.add_argument(
        "--model", nargs="+", default=default, help="architecture:size (default: the paper's)"
    )
    parser.add_argument("--micro_batch", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--sequence_length", type=int, default=512)
    parser.add_argument(
        "--autocast", action="store_true", help="float32 weights under bfloat16 autocast"
    )
    parser.add_argument("--result", type=Path, help="write the figures to this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
