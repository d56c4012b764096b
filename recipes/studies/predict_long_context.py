"""Predict how far each lever for long sequences reaches, without a GPU.

    python recipes/studies/predict_long_context.py
    python recipes/studies/predict_long_context.py --model llama:1.2b --device rtx4070
    python recipes/studies/predict_long_context.py --smoke

Three tables, each of a step on fake tensors as `pyao estimate` records it, optimizer on the host:

1. A ladder for one model: the peak at several lengths, what one token more takes, and the longest
   sequence on the line through the first and the last, with one lever of `long_context` more on
   each rung; and what the host holds.
2. The longest sequence at micro-batch 1, for each model and card, all weights trained or LoRA.
3. The largest micro-batch of 512 tokens on a card of 12 GiB.

What is assumed is in the result file. No figure from here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from hf_pyao.levers import Levers
from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.tools.estimate.assumptions import ASSUMPTIONS
from hf_pyao.tools.estimate.estimate import Estimator
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.ways import LONG_CONTEXT, WAYS, Way

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from result_file import write_result

SCHEMA_VERSION = 1
GB = 1e9

NOTHING, CHECKPOINTING, OFFLOADING = WAYS[:3]
LADDER: tuple[tuple[Way, str], ...] = (
    (CHECKPOINTING, "off"),
    (CHECKPOINTING, "chunked"),
    (
        Way(
            "layer inputs leave",
            offloads=True,
            levers=Levers(head_loss="chunked", checkpoint_every=1),
        ),
        "chunked",
    ),
    (
        Way(
            "and tiled MLPs and norms",
            offloads=True,
            levers=Levers(head_loss="chunked", checkpoint_every=1, mlp_tiles="auto"),
        ),
        "chunked",
    ),
    (
        Way(
            "and attention in groups",
            offloads=True,
            levers=Levers(
                head_loss="chunked",
                checkpoint_every=1,
                mlp_tiles="auto",
                attention_groups="auto",
            ),
        ),
        "chunked",
    ),
    (
        Way(
            "the same, segments of 2",
            offloads=True,
            levers=Levers(
                head_loss="chunked",
                checkpoint_every=2,
                mlp_tiles="auto",
                attention_groups="auto",
            ),
        ),
        "chunked",
    ),
    *(
        (
            Way(
                f"the same, segments of {every}, nested",
                offloads=True,
                levers=Levers(
                    head_loss="chunked",
                    checkpoint_every=every,
                    checkpoint_nested=True,
                    mlp_tiles="auto",
                    attention_groups="auto",
                ),
            ),
            "chunked",
        )
        for every in (2, 4)
    ),
    (LONG_CONTEXT, "chunked"),
)
"""Ways, each with the loss; the last one saves attention too."""

COMPARED: tuple[tuple[Way, str], ...] = (
    (NOTHING, "off"),
    (CHECKPOINTING, "off"),
    (CHECKPOINTING, "chunked"),
    (OFFLOADING, "chunked"),
    (LONG_CONTEXT, "chunked"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A way to train one model on one card."""

    table: str
    model: str
    device: str
    training: str
    """``full``, or LoRA with its rank."""
    way: str
    longest_sequence: int | None = None
    is_limited_by_positions: bool = False
    largest_micro_batch: int | None = None
    bytes_per_token: float | None = None
    """On the device, between the first and the last length."""
    peak_bytes: dict[str, int] | None = None
    """By tokens."""
    host_bytes: dict[str, int] | None = None
    peak_tensor: str = ""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables, and write the rows if asked to."""
    args = _parse(argv)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    found = []
    for row in tqdm(_rows(args), unit=" rows", disable=None, leave=False):
        found.append(row)
        tqdm.write(_line(row))
    if args.result is not None:
        write_result(
            args.result,
            kind="predicted_long_context",
            schema_version=SCHEMA_VERSION,
            is_measured=False,
            assumptions=ASSUMPTIONS,
            rows=found,
        )


def _rows(args: argparse.Namespace) -> Iterator[Row]:
    yield from _ladder(args.ladder_model, args.ladder_device, args.ladder_lengths)
    for model in args.model:
        for device in args.device:
            for rank in (None, args.lora):
                yield from _longest(model, device, rank)
    for model in args.model:
        yield from _micro_batches(model, args.device[0])


def _ladder(model: str, device: str, lengths: Sequence[int]) -> Iterator[Row]:
    estimator = _estimator(model, device)
    for way, head_loss in LADDER:
        peaks, hosts = {}, {}
        for length in lengths:
            estimator.sequence_length = length
            predicted = estimator.predicted(way, head_loss, 1)
            peaks[str(length)] = predicted.late.peak_bytes
            hosts[str(length)] = predicted.late.host_peak_bytes
        low, high = peaks[str(lengths[0])], peaks[str(lengths[-1])]
        slope = (high - low) / (lengths[-1] - lengths[0])
        yield Row(
            table="ladder",
            model=model,
            device=device,
            training="full",
            way=way.name_with(head_loss),
            longest_sequence=lengths[0] + int((estimator.limit_bytes - low) / slope),
            bytes_per_token=slope,
            peak_bytes=peaks,
            host_bytes=hosts,
        )


def _longest(model: str, device: str, rank: int | None) -> Iterator[Row]:
    estimator = _estimator(model, device, rank)
    for way, head_loss in COMPARED:
        longest = estimator.longest_sequence(way, head_loss)
        yield Row(
            table="longest sequence",
            model=model,
            device=device,
            training="full" if rank is None else f"LoRA, rank {rank}",
            way=way.name_with(head_loss),
            longest_sequence=longest,
            is_limited_by_positions=longest == estimator.most_length,
        )


def _micro_batches(model: str, device: str) -> Iterator[Row]:
    estimator = _estimator(model, device)
    for way, head_loss in COMPARED:
        row = estimator.row(way, head_loss, with_longest=False)
        yield Row(
            table="largest micro-batch of 512 tokens",
            model=model,
            device=device,
            training="full",
            way=row.method,
            largest_micro_batch=row.largest_micro_batch,
            host_bytes={"512": row.host_bytes},
            peak_tensor=row.peak_tensor,
        )


def _estimator(model: str, device: str, rank: int | None = None) -> Estimator:
    return Estimator(config_of(parse_model(model)), find_hardware(device), lora_rank=rank)


def _line(row: Row) -> str:
    head = f"{row.table[:8]:8} | {row.model:10} | {row.device:8} | {row.training:13} | {row.way:32}"
    if row.largest_micro_batch is not None:
        return f"{head} | {row.largest_micro_batch:>9,} samples"
    limit = " (all positions)" if row.is_limited_by_positions else ""
    line = f"{head} | {row.longest_sequence:>9,} tokens{limit}"
    if row.bytes_per_token is not None:
        assert row.host_bytes is not None
        length, host = list(row.host_bytes.items())[-1]
        line += f" | {row.bytes_per_token / 1e3:7,.1f} kB a token"
        line += f" | host {host / GB:,.0f} GB at {int(length):,}"
    return line


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=["opt:1.3b", "gpt2:0.8b", "llama:1.2b"])
    parser.add_argument("--device", nargs="+", default=["rtx4070", "rtx4090"], help="12 and 24 GB")
    parser.add_argument("--lora", type=int, default=16, help="rank of LoRA (default: 16)")
    parser.add_argument("--ladder_model", default="llama:8b")
    parser.add_argument("--ladder_device", default="h200")
    parser.add_argument(
        "--ladder_lengths", nargs="+", type=int, default=[65_536, 262_144, 1_200_000]
    )
    parser.add_argument("--result", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--smoke", action="store_true", help="a tiny ladder alone: does it run?")
    args = parser.parse_args(argv)
    if args.smoke:
        args.model, args.ladder_model, args.ladder_lengths = [], "llama:micro", [64, 128]
    return args


if __name__ == "__main__":
    main()
