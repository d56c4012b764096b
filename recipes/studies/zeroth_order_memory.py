"""Device memory of zeroth order beside ZO2's published figures, and the overlap of its copies.

    python recipes/studies/zeroth_order_memory.py
    python recipes/studies/zeroth_order_memory.py --result recipes/results/zeroth_order_memory.json
    python recipes/studies/zeroth_order_memory.py --smoke

Nothing is trained, and no GPU is needed: passes run on fake tensors, steps on a virtual clock.
ZO2's figures are of its paper (arXiv 2503.12668): OPT, one sequence of 2,048 tokens, float16,
MeZO-SGD.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_pyao.plan.weights.visit_clock import VisitClock, VisitTimes, least_step_ms
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.zeroth_order.estimate import GB, ZerothOrderMemory, zeroth_order_memory
from result_file import write_result

SCHEMA_VERSION = 1
TOKENS = 2048
ZO2_GB = (
    ("OPT-1.3B", 2048, 24, 32, 3.75),
    ("OPT-2.7B", 2560, 32, 32, 4.14),
    ("OPT-6.7B", 4096, 32, 32, 4.99),
    ("OPT-13B", 5120, 40, 40, 6.18),
    ("OPT-30B", 7168, 48, 56, 8.86),
    ("OPT-66B", 9216, 64, 72, 12.07),
    ("OPT-175B", 12288, 96, 96, 18.04),
)
"""Model, width, layers, heads; ZO2's device memory in GB."""

OVERLAP = (
    ("OPT-1.3B", 24, 12.0, 3.0),
    ("OPT-6.7B", 32, 35.0, 11.0),
    ("OPT-30B", 48, 85.0, 32.0),
)
"""Model and layers; published ms of a block's compute, and of its upload and of its copy back. The
times fit one byte a parameter at 19 GB/s; half precision over PCIe 4.0 x16 takes twice as long."""


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One model beside the published figure."""

    model: str
    published_gb: float
    ours_gb: float
    parts: ZerothOrderMemory


@dataclass(frozen=True, kw_only=True)
class OverlapRow:
    """A step on the clock, in ms."""

    model: str
    upload_ms: float
    compute_ms: float
    step_ms: float
    """With two slots."""
    busiest_lane_ms: float
    one_slot_ms: float
    """Without overlap of uploads and compute."""


def memory_row(name: str, width: int, layers: int, heads: int, published_gb: float) -> MemoryRow:
    """Return the row of one OPT."""
    config = config_of(
        parse_model(
            f"opt:hidden_size={width},word_embed_proj_dim={width},ffn_dim={4 * width},"
            f"num_hidden_layers={layers},num_attention_heads={heads},"
            f"max_position_embeddings={TOKENS},vocab_size=50272"
        )
    )
    found = zeroth_order_memory(config, 1, TOKENS)
    return MemoryRow(
        model=name, published_gb=published_gb, ours_gb=found.peak_bytes / GB, parts=found
    )


def overlap_row(name: str, layers: int, compute_ms: float, upload_ms: float) -> OverlapRow:
    """Return the row of one model, its layers alone."""
    blocks = [VisitTimes(compute_ms, upload_ms, upload_ms)] * layers

    def second_step_ms(num_slots: int) -> float:
        clock = VisitClock(blocks, num_slots)
        clock.step_ms()
        return clock.step_ms()

    return OverlapRow(
        model=name,
        upload_ms=upload_ms,
        compute_ms=compute_ms,
        step_ms=second_step_ms(2),
        busiest_lane_ms=least_step_ms(blocks),
        one_slot_ms=second_step_ms(1),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print both tables; write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--smoke", action="store_true", help="the smallest model alone")
    args = parser.parse_args(argv)
    num = 1 if args.smoke else None
    memory = [memory_row(*each) for each in ZO2_GB[:num]]
    print("device memory, GB | published | ours | slots | resident | pass | waiting")
    for row in memory:
        parts = row.parts
        others = (parts.resident_bytes, parts.pass_bytes, parts.waiting_bytes)
        cells = [
            row.published_gb,
            row.ours_gb,
            2 * parts.slot_bytes / GB,
            *(b / GB for b in others),
        ]
        print(f"{row.model} | " + " | ".join(f"{cell:.2f}" for cell in cells))
    overlap = [
        overlap_row(name, layers, compute_ms, factor * upload_ms)
        for factor in (1, 2)
        for name, layers, compute_ms, upload_ms in OVERLAP[:num]
    ]
    print("a step, ms | upload of a block | compute | step | busiest lane | one slot")
    for each in overlap:
        values = [each.upload_ms, each.compute_ms, each.step_ms]
        values += [each.busiest_lane_ms, each.one_slot_ms]
        print(f"{each.model} | " + " | ".join(f"{value:.0f}" for value in values))
    if args.result is not None:
        write_result(
            args.result,
            kind="zeroth order memory",
            schema_version=SCHEMA_VERSION,
            tokens=TOKENS,
            memory=[asdict(row) for row in memory],
            overlap=[asdict(row) for row in overlap],
        )


if __name__ == "__main__":
    main()
