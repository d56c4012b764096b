"""Predict the largest micro-batch that a card holds, without one, and compare ways to get there.

    python recipes/studies/predict_micro_batch.py
    python recipes/studies/predict_micro_batch.py --model llama:1.2b --device_gib 24
    python recipes/studies/predict_micro_batch.py --smoke

A whole training step runs on fake tensors: the model, the engine (`attach`) and the head loss are
the real ones, no memory is taken and no arithmetic is done. A ledger counts every storage that
would be alive on the device, by its identity, through forward, loss and backward. The micro-batch
is raised until the peak passes the card's memory: the one that is printed was run and fits, and the
next one was run and does not.

What is assumed is printed below the table, and written to the result file. It is a prediction: no
figure from here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_pyao.config import DEFAULT_KEEP_LAST_LAYERS, DEFAULT_WINDOW_BYTES, GIB, PyAOConfig
from hf_pyao.tools.estimate.fake_step import UNLIMITED_HOST_GIB, FakeTraining, StepPeak, peak_of
from hf_pyao.tools.estimate.model_sizes import PAPER_SIZES, build_config, find_size
from hf_pyao.tools.estimate.search import largest_fitting

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from result_file import write_result

SCHEMA_VERSION = 1

ASSUMPTIONS = (
    "bfloat16 weights, without a float32 copy on the device; dropout as the configurations have "
    "it; no padding",
    "training state 'host': ZeRO-2 with its optimizer offloaded. A gradient leaves the device when "
    "it is complete, through one bucket of 1e9 bytes that is there throughout backward; AdamW is "
    "on the host. 'device': all gradients are on the device before backward ends, and always two "
    "moments of AdamW in bfloat16; its step's own temporaries are not counted",
    "CUDA's choice of operations: flash attention, dropout masks of one byte, products of halves "
    "that are summed in float32 in the head loss; a CPU's for the rest",
    "copies are never done before something waits for them: the windows in flight are always full",
    "chunks of the head loss as on a card of 12 GiB: 512 MiB at most",
    "the model's outputs live on during backward, logits included where there are any",
    "a storage counts from the end of the operation that makes it until its last tensor is gone; "
    "workspaces inside operations, the CUDA context, NCCL and fragmentation are not counted: "
    "`reserve` is set aside for them",
    "autograd adds gradients out of place, as it does under a dispatch mode; without one it adds "
    "many in place, so that the count is on the high side",
)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train."""

    name: str
    policy: str = "off"
    """``PyAOConfig.policy``."""
    head_loss: str = "off"
    """``PyAOConfig.head_loss``."""
    window: str | int = DEFAULT_WINDOW_BYTES
    """``PyAOConfig.window``."""
    checkpointing: bool = False


METHODS = (
    Method(name="none"),
    Method(name="checkpointing", checkpointing=True),
    Method(name="policy all", policy="all"),
    Method(name="chunked loss", head_loss="chunked"),
    Method(name="checkpointing + chunked loss", checkpointing=True, head_loss="chunked"),
    Method(name="policy all + chunked loss", policy="all", head_loss="chunked"),
    Method(name="the same, window 'layer'", policy="all", head_loss="chunked", window="layer"),
    Method(
        name="policy all + checkpointing + chunked loss",
        policy="all",
        checkpointing=True,
        head_loss="chunked",
    ),
)
"""What is compared, by rising effort."""

TRAINING_STATES = ("host", "device")
"""Where gradients and AdamW's moments are: see :class:`FakeTraining`."""


def peak_of_step(
    architecture: str,
    size: str,
    method: Method,
    micro_batch: int,
    *,
    sequence_length: int = 512,
    training_state: str = "host",
    keep_last_layers: int = DEFAULT_KEEP_LAST_LAYERS,
) -> StepPeak:
    """Run one step of a bfloat16 model and return what would be alive on the device.

    Args:
        architecture: transformers' ``model_type``.
        size: its row in ``model_sizes.py``.
        method: how to train.
        micro_batch: samples.
        sequence_length: tokens of each, without padding.
        training_state: as in :class:`FakeTraining`.
        keep_last_layers: ``PyAOConfig.keep_last_layers``.
    """
    training = FakeTraining(
        config=build_config(architecture, find_size(architecture, size)),
        checkpointing=method.checkpointing,
        training_state=training_state,
    )
    settings = PyAOConfig(
        policy=method.policy,
        head_loss=method.head_loss,
        window=method.window,
        keep_last_layers=keep_last_layers,
        host_memory_gib=UNLIMITED_HOST_GIB,
    )
    return peak_of(training, settings, micro_batch, sequence_length)


def main(argv: Sequence[str] | None = None) -> None:
    """Search for every model and method; print a table, and write the figures if asked to."""
    args = _parse(argv)
    torch.set_num_threads(1)
    limit_bytes = int(args.device_gib * GIB * (1 - args.reserve))
    rows = []
    print(f"largest micro-batch of {args.sequence_length} tokens within {limit_bytes / 1e9:.2f} GB")
    for training_state in args.training_state:
        for spec in args.model:
            for method in _methods(args.method):
                options = {
                    "sequence_length": args.sequence_length,
                    "training_state": training_state,
                    "keep_last_layers": args.keep_last_layers,
                }
                row = predict(spec, method, limit_bytes, **options)
                rows.append(row)
                print(_line(row), flush=True)
    print("assumed:", *(f"- {text}" for text in ASSUMPTIONS), sep="\n")
    if args.result is not None:
        write_result(
            args.result,
            kind="predicted_micro_batch",
            schema_version=SCHEMA_VERSION,
            is_measured=False,
            assumptions=ASSUMPTIONS,
            sequence_length=args.sequence_length,
            device_gib=args.device_gib,
            reserve=args.reserve,
            limit_bytes=limit_bytes,
            rows=rows,
        )


def predict(spec: str, method: Method, limit_bytes: int, **options: Any) -> dict[str, Any]:
    """Find the largest micro-batch of one model and method.

    Args:
        spec: ``architecture:size``, as in ``hf_pyao/tools/estimate/model_sizes.py``.
        method: how to train.
        limit_bytes: most bytes on the device.
        options: keyword arguments of :func:`peak_of_step`.
    """
    architecture, _, size = spec.partition(":")
    start = time.perf_counter()
    steps: dict[int, StepPeak] = {}

    def peak_bytes(micro_batch: int) -> int:
        if micro_batch not in steps:
            steps[micro_batch] = peak_of_step(architecture, size, method, micro_batch, **options)
        return steps[micro_batch].peak_bytes

    largest = largest_fitting(peak_bytes, limit_bytes)
    shown = steps[max(largest, 1)]
    return {
        "model": f"{architecture}-{size}",
        "method": method.name,
        **options,
        "largest_micro_batch": largest,
        "peak_bytes": {str(mb): step.peak_bytes for mb, step in sorted(steps.items())},
        "bytes_per_sample": steps[largest + 1].peak_bytes - shown.peak_bytes if largest else None,
        "phase_peak_bytes": shown.phase_peak_bytes,
        "weights_bytes": shown.weights_bytes,
        "state_bytes": shown.state_bytes,
        "offloaded_bytes": shown.offloaded_bytes,
        "num_chunks": shown.num_chunks,
        "seconds": round(time.perf_counter() - start, 1),
    }


def _methods(names: Sequence[str] | None) -> list[Method]:
    return [method for method in METHODS if not names or method.name in names]


def _line(row: dict[str, Any]) -> str:
    largest = row["largest_micro_batch"]
    peak = row["peak_bytes"][str(max(largest, 1))]
    slope = row["bytes_per_sample"]
    each = "does not fit" if slope is None else f"{slope / 1e9:6.3f} GB for one more"
    return (
        f"| {row['model']:<10} | {row['training_state']:<6} | {row['method']:<40} | {largest:>4} "
        f"| {peak / 1e9:6.2f} GB | {each}"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = [f"{architecture}:{size}" for architecture, size in PAPER_SIZES.items()]
    names = [method.name for method in METHODS]
    parser.add_argument(
        "--model",
        nargs="+",
        default=default,
        help="architecture:size, as ../train_opt.py and its like have them (default: the PyAO "
        "paper's: %(default)s)",
    )
    parser.add_argument(
        "--method",
        nargs="+",
        choices=names,
        metavar="NAME",
        help=f"only these; each is one of: {'; '.join(names)}",
    )
    parser.add_argument(
        "--training_state",
        nargs="+",
        choices=TRAINING_STATES,
        default=["host"],
        help="gradients and AdamW's moments: host (ZeRO-2 with its optimizer offloaded, the "
        "default), or device (a plain loop, all in bfloat16)",
    )
    parser.add_argument(
        "--keep_last_layers",
        type=int,
        default=1,
        help="layers whose saved tensors stay, where any are offloaded (default: %(default)s)",
    )
    parser.add_argument("--sequence_length", type=int, default=512, help="tokens in each sample")
    parser.add_argument("--device_gib", type=float, default=12.0, help="memory of the card, GiB")
    parser.add_argument(
        "--reserve",
        type=float,
        default=0.04,
        help="share of it for what is not counted (default: %(default)s)",
    )
    parser.add_argument("--result", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--smoke", action="store_true", help="a tiny model: does it run?")
    args = parser.parse_args(argv)
    if args.smoke:
        args.model, args.training_state = ["llama:micro"], ["device"]
        args.method = ["none", "policy all + chunked loss"]
        args.sequence_length, args.device_gib = 64, 0.5
    return args


if __name__ == "__main__":
    main()
