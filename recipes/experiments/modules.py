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
from experiments.measured import NOTHING, count_step, size_of
from experiments.predictor import ASSUMPTIONS, Predictor, predictors
from experiments.rows import Result, Row
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
        rows += _modules(model, predictor, 2 if options.is_smoke else MEGATRON_BATCH)
    card = (
        f"{MEGATRON_CARD.upper()} of hf_pyao/plan/hardware/presets.py, link 50e9 bytes/s each way, "
        f"micro-batch {MEGATRON_BATCH}; byte window of 256 MiB, the last layer stays"
    )
    return Result(rows=rows, assumptions=[*ASSUMPTIONS[1:3], card])


def miniature_modules(options: Options) -> Result:
    """Count what small models hold and move on a CPU: bytes are exact, and nothing is timed."""
    size, micro_batch = size_of(options), 2 if options.is_smoke else MINIATURE_BATCH
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
            again = name == "checkpointing"
            counted = count_step(model, settings, micro_batch, size, checkpointing=again)
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
    assumption = (
        "small models in float32 on a CPU: bytes are exact; no device memory is measured, and no "
        "time is taken, because copies and compute share a CPU's cores"
    )
    return Result(rows=rows, assumptions=[assumption])


def _modules(model: str, predictor: Predictor, micro_batch: int) -> Iterator[Row]:
    hardware = find_hardware(MEGATRON_CARD)
    window_bytes = DEFAULT_WINDOW_BYTES
    plain = predictor.program(BASELINE, micro_batch)
    training = FakeTraining(config=predictor.config)
    light = record_step(
        *(training, micro_batch, published.SEQUENCE_LENGTH),
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
                "tokens_per_s": micro_batch * published.SEQUENCE_LENGTH / found.step_ms * 1e3,
                "offloaded_gb": found.offloaded_bytes / 1e9,
            },
        )
