"""Megatron-Core: memory and throughput for each offloaded module, recomputation, and both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from experiments import published
from experiments.experiment import Options, progress
from experiments.hiding import at
from experiments.measured import MINIATURE_SIZE, NOTHING, count_step
from experiments.page import bullets, grid, paragraph
from experiments.plots import grouped_bars
from experiments.predictor import ASSUMPTIONS, Predictor, predictors
from experiments.rows import PREDICT, Result, Row, one, select, values
from experiments.systems import BASELINE, CHECKPOINTING, MODELS, PYAO
from hf_pyao.config import DEFAULT_WINDOW_BYTES
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.model.map.module_roles import role_of_submodules
from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.plan.step.prediction import Prediction
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.recorded_step import record_step

ROLES = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "mlp_up",
    "mlp_act",
    "mlp_down",
)
LIGHT = ("attn_norm", "mlp_norm", "mlp_act")
"""What little compute makes: recomputed, as Megatron-Core does with norms and activations."""
MEGATRON_CARD, MEGATRON_BATCH = "h200", 16
MINIATURE_BATCH = 4
BOTH = "both: recompute these, offload the rest"
METHODS = {
    "nothing": "none",
    **{f"offload {role}": f"pyao:policy=modules,modules={role}" for role in ROLES},
    "offload everything": "pyao:policy=all",
    "recompute norms + mlp_act": f"pyao:policy=off,recompute_modules={'+'.join(LIGHT)}",
    BOTH: f"pyao:policy=all,recompute_modules={'+'.join(LIGHT)}",
    "checkpointing": "checkpoint",
}
"""Name of a row -> method of ``pyao bench``."""


def roles_of(config: PretrainedConfig) -> dict[str, str]:
    """Return path -> role for all sub-modules of the first layer of a model with *config*."""
    with torch.device("meta"):
        found = find_layers(AutoModelForCausalLM.from_config(config))
    fqn, layer = found.layers[0]
    return role_of_submodules(layer, found.roles_of(fqn))


def predict_modules(options: Options) -> Result:
    """Predict memory and throughput for each offloaded module, recomputation, and both."""
    rows: list[Row] = []
    for model, predictor in predictors(options, "Megatron"):
        micro_batch = 2 if options.is_smoke else MEGATRON_BATCH
        rows += _modules(model, predictor, micro_batch)
    return Result(
        rows=rows,
        assumptions=[
            *ASSUMPTIONS[1:3],
            f"{MEGATRON_CARD.upper()} of hf_pyao/plan/hardware/presets.py, link 50e9 bytes/s each "
            "way, "
            f"micro-batch {MEGATRON_BATCH}; byte window of 256 MiB, the last layer stays",
        ],
    )


def miniature_modules(options: Options) -> Result:
    """Count what small models hold and move on a CPU: bytes are exact, and nothing is timed."""
    size = "micro" if options.is_smoke else MINIATURE_SIZE
    micro_batch = 2 if options.is_smoke else MINIATURE_BATCH
    light = {"recompute_modules": LIGHT}
    ways: dict[str, dict[str, Any]] = {
        "nothing": NOTHING,
        **{f"offload {role}": {"policy": "modules", "modules": (role,)} for role in ROLES},
        "offload everything": {"policy": "all"},
        "recompute norms + mlp_act": {**NOTHING, **light},
        BOTH: {"policy": "all", **light},
        "checkpointing": NOTHING,
    }
    rows: list[Row] = []
    for model in progress(options.models, "Megatron"):
        first = 0.0
        for name, settings in ways.items():
            counted = count_step(
                model, settings, micro_batch, size, checkpointing=name == "checkpointing"
            )
            first = first or counted["held_bytes"]
            rows.append(
                Row(
                    model=f"{model}:{size}",
                    system=name,
                    micro_batch=micro_batch,
                    quantity="held after forward, less",
                    unit="of what is held",
                    value=1 - counted["held_bytes"] / first,
                    detail={
                        "held_mb": counted["held_bytes"] / 1e6,
                        "offloaded_mb": counted["offloaded_bytes"] / 1e6,
                    },
                )
            )
    return Result(
        rows=rows,
        assumptions=[
            "small models in float32 on a CPU: bytes are exact; no device memory is measured, and "
            "no time is taken, because copies and compute share a CPU's cores",
        ],
    )


def _modules(model: str, predictor: Predictor, micro_batch: int) -> Iterator[Row]:
    hardware = find_hardware(MEGATRON_CARD)
    window_bytes = DEFAULT_WINDOW_BYTES
    plain = predictor.program(BASELINE, micro_batch)
    training = FakeTraining(config=predictor.config)
    light = record_step(
        *(training, micro_batch, predictor.sequence_length),
        recompute_modules=LIGHT,
        keep_last_layers=1,
    )

    owners = roles_of(predictor.config)

    def picks(roles: Sequence[str]) -> Callable[[str], bool]:
        return lambda slot: owners.get(slot.rpartition(":")[0]) in roles

    heavy = [role for role in ROLES if role not in LIGHT]
    programs: dict[str, tuple[StepProgram, Callable[[str], bool] | bool]] = {
        "nothing": (plain, False),
        **{f"offload {role}": (plain, picks((role,))) for role in ROLES},
        "offload core_attn + mlp_act": (plain, picks(("core_attn", "mlp_act"))),
        "offload everything": (plain, True),
        "recompute norms + mlp_act": (light, False),
        BOTH: (light, picks(heavy)),
        "checkpointing": (predictor.program(CHECKPOINTING, micro_batch), False),
        "offload everything, chunked loss": (
            predictor.program(dataclasses.replace(PYAO, head_loss="chunked"), micro_batch),
            True,
        ),
    }
    first: Prediction | None = None
    for name, (program, offloads) in programs.items():
        found = at(program, hardware, offloads, window_bytes)
        first = first or found
        common: dict[str, Any] = {
            "model": MODELS[model],
            "system": name,
            "micro_batch": micro_batch,
        }
        yield Row(
            **common,
            quantity="peak device memory, less",
            unit="of the peak",
            value=1 - found.peak_bytes / first.peak_bytes,
            detail={"peak_gb": found.peak_bytes / 1e9},
        )
        yield Row(
            **common,
            quantity="throughput, less",
            unit="of the throughput",
            value=1 - first.step_ms / found.step_ms,
            detail={
                "tokens_per_s": micro_batch * predictor.sequence_length / found.step_ms * 1e3,
                "offloaded_gb": found.offloaded_bytes / 1e9,
            },
        )


def counted_modules(document: dict[str, Any]) -> list[str]:
    """Write of Megatron's modules, in miniature."""
    rows = document["rows"]

    def less(system: str, model: str) -> str:
        row = one(rows, model=model, system=system)
        moved_mb = row["detail"]["offloaded_mb"]
        return f"−{row['value']:.1%} / {moved_mb:.2f}" if row["value"] else "0"

    return [
        paragraph(
            "*Mode: miniature.* Small models on a CPU, micro-batch "
            f"{rows[0]['micro_batch']}: how much less the layers hold after forward / "
            "MB that left. Nothing is timed: a CPU's copies and compute share its cores."
        ),
        grid("", values(rows, "model"), values(rows, "system"), less),
    ]


def predicted_modules(found: dict[str, Any]) -> list[str]:
    """Write of Megatron's modules, predicted."""

    def cell(system: str, model: str) -> str:
        less, slower = (
            one(found["rows"], model=model, system=system, quantity=quantity)["value"]
            for quantity in ("peak device memory, less", "throughput, less")
        )
        return f"−{less:.1%} / −{slower:.1%}" if less or slower else "0"

    low, high = published.MEGATRON_MEMORY_CUT
    least, most = published.MEGATRON_SLOWDOWN
    gain = published.MEGATRON_WITH_RECOMPUTE
    return [
        paragraph(
            "*Mode: predict.* Peak memory / throughput, each against keeping everything; one "
            "H200 with a link of 50 GB/s at micro-batch 16. The article's text has ranges alone: "
            f"{low:.0%} to {high:.0%} less memory at {least:.0%} to {most:.0%} less throughput, "
            f"and {gain[0]:.0%} to {gain[1]:.0%} more throughput with recomputation where that "
            "frees other settings; its tables by module are not in the text."
        ),
        grid("", list(MODELS.values()), values(found["rows"], "system"), cell),
        bullets(
            [
                "Its models are mixtures of experts of 100 billion parameters and more, on 64 to "
                "512 GPUs with pipelines, whose layers compute far longer for a byte that they "
                "save. Ours are the PyAO paper's three.",
                "On an H200 these are bound by the link: of single modules, those that save as "
                "much memory as the article's least cost more than the article's most.",
                "Norms and activation functions are cheap to compute again: recomputing them and "
                "offloading the rest loses less throughput than offloading everything, as the "
                "article says, and saves less memory. Checkpointing saves more memory than that in "
                "all three models, and for GPT-2 it costs less time, too.",
                "ZeRO-1 with accumulation adds the same gradients to every row.",
            ]
        ),
    ]


def plot_modules(document: dict[str, Any]) -> Any:
    """Draw memory saved over throughput lost."""
    quantity, label = "throughput, less", "throughput lost, %"
    if document["mode"] != PREDICT:
        quantity, label = "held after forward, less", "held after forward, less, %"
    rows = select(document["rows"], quantity=quantity)
    bars = [(row["model"], row["system"], 100 * row["value"]) for row in rows]
    return grouped_bars([bar for bar in bars if bar[1] != "nothing"], label)
