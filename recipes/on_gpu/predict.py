"""What is predicted of the rows of the GPU day, for cards that may come."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from tqdm.auto import tqdm

from hf_pyao.config import DEFAULT_WINDOW_BYTES
from hf_pyao.errors import PyAOError
from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.hardware.presets import Hardware, find_hardware
from hf_pyao.plan.predict.predict import operation_times_ms, predict
from hf_pyao.plan.step.streamed_step import with_streamed_blocks
from hf_pyao.tools.estimate.common_arguments import training_fields
from hf_pyao.tools.estimate.estimate import Estimator
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.ways import METHODS
from on_gpu.parts import PARTS
from on_gpu.rows import CAP_GIB, WAYS, Row, all_rows

CARDS = ("h100", "h200")
STREAMED = ", streamed"


def predictions(cards: tuple[str, ...] = CARDS) -> dict[str, dict[str, Any]]:
    """Return what each row takes on each card: by card, then by the row's name."""
    rows = [(card, row) for card in cards for row in all_rows()]
    found: dict[str, dict[str, Any]] = {card: {} for card in cards}
    estimators: dict[Any, Estimator] = {}
    for card, row in tqdm(rows, desc="predicting", disable=not sys.stderr.isatty()):
        found[card][row.name] = _predicted(row, card, estimators)
    return found


def _predicted(row: Row, card: str, estimators: dict[Any, Estimator]) -> dict[str, Any]:
    """Return times in ms and memory in bytes, or why there is no prediction."""
    way = WAYS[row.way]
    is_streamed = row.way.endswith(STREAMED)
    name = WAYS[row.way.removesuffix(STREAMED)].estimate
    if name is None:
        return {"reason": "this way is not predicted"}
    budget_gib = row.cap_gib or row.settings.get("device_memory_gib")
    if row.predicted_on is not None and budget_gib is not None:
        budget_gib /= 2  # predicted in bf16, run in fp32
    is_expandable = PARTS[row.part].is_expandable
    key = (
        card,
        is_expandable,
        *row.setup,
        row.tokens,
        row.engine,
        row.attention,
        budget_gib,
        row.predicted_on,
    )
    try:
        if key not in estimators:
            estimators[key] = _estimator(row, card, budget_gib)
        estimator = estimators[key]
        predicted, _ = estimator.predicted(METHODS[name], row.micro_batch)
    except PyAOError as error:
        return {"reason": f"{error}"}
    step = {
        "step_ms": predicted.timed.step_ms,
        "offloaded_bytes": predicted.timed.offloaded_bytes,
        "pinned_bytes": predicted.timed.host_peak_bytes,
    }
    if is_streamed:
        program = predicted.program
        streamed = predict(
            with_streamed_blocks(program, range(program.num_layers)),
            estimator.leaves(METHODS[name], program),
            window_bytes=DEFAULT_WINDOW_BYTES,
            times_ms=operation_times_ms(program, estimator.hardware.device),
            link=estimator.hardware.link,
        )
        return {**step, "step_ms": streamed.step_ms, "allocated_bytes": streamed.peak_bytes}
    if row.predicted_on is not None or way.estimate is None:
        return step  # another card's memory says nothing, and this one's runs another dtype
    return {
        **step,
        "allocated_bytes": predicted.late.peak_bytes,
        "reserved_bytes": predicted.memory.reserved_within(estimator.limit_bytes),
        "fits": predicted.memory.fits(estimator.limit_bytes),
    }


def _estimator(row: Row, card: str, budget_gib: float | None) -> Estimator:
    hardware = find_hardware(row.predicted_on or card)
    if budget_gib is not None:
        hardware = with_cap(hardware, budget_gib)
    engine = "zero2" if row.engine == "zero2" else "plain"
    fields = training_fields(
        hardware,
        engine=engine,
        optimizer="adamw" if row.engine == "adamw" else "sgd",
        lora_rank=row.lora_rank,
        adapter_dtype="bfloat16",
        attention=row.attention if row.predicted_on is None else "flash",
    )
    config = config_of(parse_model(row.model))
    allocator = AllocatorSettings(expandable_segments=PARTS[row.part].is_expandable)
    return Estimator(config, hardware, sequence_length=row.tokens, allocator=allocator, **fields)


def with_cap(hardware: Hardware, cap_gib: float = CAP_GIB) -> Hardware:
    """Return *hardware* with memory for *cap_gib* of tensors: the cap counts no context."""
    memory_gib = cap_gib + hardware.context_gib
    return dataclasses.replace(hardware, memory_gib=memory_gib)
