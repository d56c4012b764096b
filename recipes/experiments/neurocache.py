"""NeuroCache: its Table 1, its sweep over budgets (Table 2), and its 20-step validation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from experiments import published
from experiments.experiment import Options
from experiments.rows import OK, OUT_OF_MEMORY, Result, Row
from hf_pyao.config import PyAOConfig
from hf_pyao.levers import Levers
from hf_pyao.plan.documents.sweep import SweepPoint
from hf_pyao.plan.hardware.presets import Hardware, find_hardware
from hf_pyao.plan.paper.sweep import Budgets, parse_budgets
from hf_pyao.tools.estimate.assumptions import ASSUMPTIONS
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.predicted_sweep import predict_points
from hf_pyao.tools.estimate.recorded_step import record_step

MIB = 2**20
SHAPE = (
    "gpt2:vocab_size=16000,n_positions=768,n_embd=768,n_layer=12,n_head=12,resid_pdrop=0.0,"
    "embd_pdrop=0.0,attn_pdrop=0.0,bos_token_id=0,eos_token_id=0"
)
"""97.93 million parameters (its section 4.1)."""
MICRO_SHAPE = (
    "gpt2:vocab_size=512,n_positions=128,n_embd=32,n_layer=2,n_head=4,resid_pdrop=0.0,"
    "embd_pdrop=0.0,attn_pdrop=0.0,bos_token_id=0,eos_token_id=0"
)
"""Of a smoke run."""
MICRO_BATCH, LENGTH = 8, 768
BUDGETS = "0,1,2,3,4,5,6,8,10"
TFLOP_PER_S = 4.3
"""85 % of the 5.1 of an RTX 2050's shaders: it trains in 32 bits."""
MOMENTS = {"32-bit": 8, "16-bit": 4}
"""Bytes of AdamW's two moments for each parameter."""

CONFIGURATIONS = (
    ("baseline", False, "32-bit", 0),
    ("checkpointing", True, "32-bit", 0),
    ("checkpointing, 16-bit moments", True, "16-bit", 0),
    ("NeuroCache, k = 5", True, "16-bit", 5),
)
FUSED = "baseline, gelu as one kernel"
MORE = (
    (FUSED, False, "32-bit", 0),
    ("PyAO, identity, without checkpointing", False, "16-bit", 10**6),
    ("NeuroCache, k = 5, chunked loss", True, "16-bit", 5),
)
"""Rows that its table has not: name, checkpointing, moments, tensors that leave."""


def card() -> Hardware:
    """Return an RTX 2050 that computes in 32 bits."""
    hardware = find_hardware("rtx2050")
    device = dataclasses.replace(hardware.device, tflop_per_s=TFLOP_PER_S)
    return dataclasses.replace(hardware, device=device)


def predict_table_1(options: Options) -> Result:
    """Predict its four configurations, and ours beside."""
    known = {row.name: row for row in published.NEUROCACHE_TABLE_1}
    rows: list[Row] = []
    for name, checkpointing, moments, budget in (*CONFIGURATIONS, *MORE):
        head_loss = "chunked" if "chunked" in name else "off"
        more = ",activation_function=gelu" if name == FUSED else ""
        (point,) = _points(options, (budget,), checkpointing, moments, head_loss, more)
        paper = known.get(name)
        peak, speed = (paper.peak_mb, paper.tokens_per_s) if paper else (None, None)
        rows += _rows_of(name, point, peak, speed)
    return Result(rows=rows, assumptions=_assumed())


def predict_table_2(options: Options) -> Result:
    """Predict its sweep over k."""
    budgets = parse_budgets("0,1" if options.is_smoke else BUDGETS)
    rows: list[Row] = []
    for point in _points(options, budgets.values, True, "16-bit"):
        peak, speed, _ = published.NEUROCACHE_TABLE_2[point.budget]
        rows += _rows_of(f"k = {point.budget}", point, peak, speed)
    return Result(rows=rows, assumptions=_assumed())


def _assumed() -> list[str]:
    first, *others = ASSUMPTIONS
    return [
        first.replace("bfloat16", "float32"),
        *others,
        f"RTX 2050 of 4 GiB at {TFLOP_PER_S} TFLOP/s in 32 bits; pack hooks take no time; the "
        "optimizer's step is not in the throughput; window='layer': copies and compute meet at the "
        "end of each layer",
    ]


def _points(
    options: Options,
    budgets: tuple[int, ...],
    checkpointing: bool,
    moments: str,
    head_loss: str = "off",
    more: str = "",
) -> list[SweepPoint]:
    shape = (MICRO_SHAPE if options.is_smoke else SHAPE) + more
    training = FakeTraining(
        config=config_of(parse_model(shape)),
        checkpointing=checkpointing,
        training_state="device",
        optimizer_bytes=MOMENTS[moments],
        dtype="float32",
    )
    micro_batch, length = (2, 64) if options.is_smoke else (MICRO_BATCH, LENGTH)
    program = record_step(training, micro_batch, length, levers=Levers(head_loss=head_loss))
    return predict_points(
        program,
        Budgets(budgets, "tensors"),
        card(),
        tokens=micro_batch * length,
        settings=PyAOConfig(
            policy="budget",
            budget=1,
            window="layer",
            min_bytes=0 if options.is_smoke else "1MiB",
        ).effective(),
    )


def _rows_of(
    name: str, point: SweepPoint, peak: float | None, speed: float | None
) -> Iterator[Row]:
    common: dict[str, Any] = {
        "model": "GPT-2 97.93M",
        "system": name,
        "micro_batch": MICRO_BATCH,
        "status": OK if point.status == "ok" else OUT_OF_MEMORY,
    }
    memory = None if point.memory_bytes is None else point.memory_bytes / MIB
    yield Row(
        **common, quantity="peak device memory", unit="MiB", value=memory, published=peak,
        note=point.reason,
    )  # fmt: skip
    yield Row(
        **common, quantity="throughput", unit="tokens/s", value=point.tokens_per_s, published=speed
    )


def predict_validation(options: Options) -> Result:
    """Predict its 20-step validation: a prediction has no steps, so that it is Table 1's."""
    rows: list[Row] = []
    configurations = {name: (chk, moments, k) for name, chk, moments, k in CONFIGURATIONS}
    for paper in published.NEUROCACHE_20_STEPS:
        checkpointing, moments, budget = configurations[paper.name]
        (point,) = _points(options, (budget,), checkpointing, moments)
        rows += _rows_of(paper.name, point, paper.peak_mb, paper.tokens_per_s)
    return Result(rows=rows, assumptions=_assumed())
