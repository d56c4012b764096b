"""Count which share of its bytes a layer stores when the rest is recomputed, without a GPU.

    python recipes/studies/count_recompute.py
    python recipes/studies/count_recompute.py --result recipes/results/recompute_bytes.json

The models of the PyAO paper are built on fake tensors, with their dropout, and the engine traces
their layers as it does in training; operations are those that CUDA picks (see
`hf_pyao/model/fake_cuda/cuda_operations.py`). What is counted is a middle layer: bytes that
autograd would hold, and bytes that are stored if everything is recomputed that needs no matrix
product ("pointwise"), or attention too. Counts of bytes, not measurements; with a device's own
kernels in the place of fake ones they are the same.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_pyao import PyAOConfig, attach
from hf_pyao.model.fake_cuda.cuda_choices import choices_of_cuda
from hf_pyao.model.fake_cuda.cuda_operations import operations_of_cuda
from hf_pyao.tools.estimate.model_sizes import PAPER_SIZES, build_config, find_size
from hf_pyao.tools.report.markdown import table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from result_file import write_result

SCHEMA_VERSION = 1
NUM_LAYERS = 3
SETS = (("pointwise",), ("pointwise", "core_attn"), ("*",))
DROPOUT = 0.1
_DROPOUTS = ("dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop")
"""What the paper's models drop; Llama drops nothing."""

MOST = {"opt": 0.78, "gpt2": 0.36, "llama": 0.48}
"""Shares that "pointwise" must not exceed."""


def count(
    architecture: str,
    size: str,
    names: tuple[str, ...],
    *,
    micro_batch: int = 4,
    sequence_length: int = 512,
    dtype: torch.dtype = torch.float16,
) -> dict[str, Any]:
    """Return the bytes of one layer: what autograd holds, and what is stored if *names* are redone.

    All layers are alike, and none is kept; so a layer's bytes are those of the stack over
    their number.
    """
    from transformers import AutoModelForCausalLM

    config = build_config(architecture, find_size(architecture, size))
    config.use_cache = False
    config.num_hidden_layers = NUM_LAYERS
    for name in _DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, DROPOUT)
    settings = PyAOConfig(
        policy="all",
        min_bytes=0,
        keep_last_layers=0,
        recompute_modules=names,
        host_memory_gib=2.0**20,
    )
    with FakeTensorMode(allow_non_fake_inputs=True), operations_of_cuda(*choices_of_cuda()):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        ).train()
        ids = torch.zeros(micro_batch, sequence_length, dtype=torch.int64)
        with attach(model, settings) as offloader:
            model(input_ids=ids, labels=ids).loss.backward()
            figures = offloader.metrics()
    held, stored = figures["would_hold_bytes"], figures["offloaded_bytes"] + figures["held_bytes"]
    return {
        "model": f"{architecture}-{size}",
        "micro_batch": micro_batch,
        "sequence_length": sequence_length,
        "dtype": str(dtype).removeprefix("torch."),
        "recompute_modules": list(names),
        "layer_would_hold_bytes": int(held) // NUM_LAYERS,
        "layer_stored_bytes": int(stored) // NUM_LAYERS,
        "layer_recomputed_bytes": int(figures["recomputed_bytes"]) // NUM_LAYERS,
        "stored_share": stored / held,
    }


def main(argv: list[str] | None = None) -> None:
    """Count and print a table; write the figures if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--result", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args(argv)
    rows = [
        count(architecture, size, names)
        for architecture, size in PAPER_SIZES.items()
        for names in SETS
    ]
    cells = [
        [
            row["model"],
            ", ".join(row["recompute_modules"]),
            f"{row['layer_would_hold_bytes'] / 1e6:.1f}",
            f"{row['layer_stored_bytes'] / 1e6:.1f}",
            f"{row['stored_share']:.1%}",
        ]
        for row in rows
    ]
    header = ["model", "recomputed", "autograd holds, MB a layer", "stored, MB", "share"]
    print(table(header, cells, num_text_columns=2))
    if arguments.result is not None:
        write_result(
            arguments.result,
            kind="recompute_bytes",
            schema_version=SCHEMA_VERSION,
            rows=rows,
        )


if __name__ == "__main__":
    main()
