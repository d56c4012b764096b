"""Where copies hide under compute: the guide's inequality, and Megatron's offloaded modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from experiments import published
from experiments.experiment import Options
from experiments.predictor import ASSUMPTIONS, SHADER_TFLOP_PER_S, Predictor, predictors
from experiments.rows import Result, Row
from experiments.systems import BASELINE, CHECKPOINTING, MODELS, OFFLOAD_ALL, OFFLOAD_ALL_INT8
from hf_pyao.config import PyAOConfig
from hf_pyao.plan.hardware.presets import Hardware, find_hardware
from hf_pyao.plan.hardware.speeds import GIB
from hf_pyao.plan.predict.predict import operation_times_ms, predict
from hf_pyao.plan.step.prediction import Prediction
from hf_pyao.plan.step.step_program import FORWARD, OUTSIDE, StepProgram

LINKS_GB_PER_S = {
    "PCIe 3.0 x8": 6.25,
    "PCIe 3.0 x16": 12.5,
    "PCIe 4.0": 25.0,
    "PCIe 5.0": 50.0,
    "NVLink-C2C": 450.0,
}
"""1e9 bytes a second, each way."""
CARDS = {
    "RTX 4070, tensor cores": ("rtx4070", None),
    "RTX 4070, shaders": ("rtx4070", SHADER_TFLOP_PER_S),
    "H200": ("h200", None),
}
MICRO_BATCH = 4


def transfer_ms(num_bytes: float, gib_per_s: float) -> float:
    """Return how long *num_bytes* are on a link."""
    return num_bytes / GIB / gib_per_s * 1e3


def overlapped_ms(compute_ms: float, num_bytes: float, gib_per_s: float) -> float:
    """Return the guide's step: with perfect overlap the longer of compute and transfer."""
    return max(compute_ms, transfer_ms(num_bytes, gib_per_s))


def break_even_gib_per_s(compute_ms: float, num_bytes: float) -> float:
    """Return the slowest link on which the transfer hides under the compute."""
    return num_bytes / GIB / (compute_ms / 1e3)


def predict_inequality(options: Options) -> Result:
    """Predict where the guide's inequality holds: models, cards and links."""
    rows = list(_guides_own())
    for model, predictor in predictors(options, "the guide's inequality"):
        for card, (name, tflop_per_s) in CARDS.items():
            hardware = find_hardware(name)
            if tflop_per_s is not None:
                device = dataclasses.replace(hardware.device, tflop_per_s=tflop_per_s)
                hardware = dataclasses.replace(hardware, device=device)
            rows += _inequality(model, predictor, card, hardware, options.is_smoke)
    return Result(rows=rows, assumptions=ASSUMPTIONS)


def _guides_own() -> Iterator[Row]:
    model = "the guide's shard, 2 GiB under 20 ms"
    for name, speed in published.GUIDE_LINKS_GIB_PER_S.items():
        yield Row(
            model=model,
            system=name,
            quantity="transfer",
            unit="ms",
            value=transfer_ms(published.GUIDE_SHARD_BYTES, speed),
            published=published.GUIDE_TRANSFER_MS[name],
        )
    yield Row(
        model=model,
        system="break-even",
        quantity="link",
        unit="GiB/s",
        value=break_even_gib_per_s(published.GUIDE_COMPUTE_MS, published.GUIDE_SHARD_BYTES),
        published=published.GUIDE_BREAK_EVEN_GIB_PER_S,
    )


def _inequality(
    model: str, predictor: Predictor, card: str, hardware: Hardware, is_smoke: bool
) -> Iterator[Row]:
    program = predictor.program(OFFLOAD_ALL, MICRO_BATCH)
    forward_ms = layer_forward_ms(program, hardware)
    exact = sum(slot.link_bytes for slot in program.slots if slot.layer == 1)
    ratio = 1.0
    if not is_smoke:
        whole = predictor.predicted(OFFLOAD_ALL, MICRO_BATCH)
        ratio = predictor.predicted(OFFLOAD_ALL_INT8, MICRO_BATCH).host_bytes / whole.host_bytes
    plain = at(predictor.program(BASELINE, MICRO_BATCH), hardware, False)
    common: dict[str, Any] = {"model": MODELS[model], "micro_batch": MICRO_BATCH}
    for name, num_bytes in (("identity", exact), ("int8", exact * ratio)):
        yield Row(
            **common,
            system=f"{card}, {name}",
            quantity="slowest link that hides a layer's forward",
            unit="GB/s",
            value=num_bytes / (forward_ms / 1e3) / 1e9,
            detail={"layer_mb": num_bytes / 1e6, "layer_forward_ms": forward_ms},
        )
    for link, gb_per_s in LINKS_GB_PER_S.items():
        speed = gb_per_s * 1e9 / GIB
        found = at(program, hardware.with_link(speed), True)
        guide_ms = overlapped_ms(plain.compute_ms, 2 * found.offloaded_bytes, speed)
        yield Row(
            **common,
            system=f"{card}, identity",
            quantity=f"step with {link} over keeping all",
            unit="x",
            value=found.step_ms / plain.compute_ms,
            detail={"guide": guide_ms / plain.compute_ms, "link_gb_per_s": gb_per_s},
        )
    checkpointed = at(predictor.program(CHECKPOINTING, MICRO_BATCH), hardware, False)
    yield Row(
        **common,
        system=f"{card}, checkpointing",
        quantity="step on any link over keeping all",
        unit="x",
        value=checkpointed.step_ms / plain.compute_ms,
    )


def layer_forward_ms(program: StepProgram, hardware: Hardware, layer: int = 1) -> float:
    """Return what a layer's forward takes."""
    times_ms = operation_times_ms(program, hardware.device)
    return sum(
        sum(times_ms[segment.start : segment.end])
        for segment in program.segments
        if segment.phase == FORWARD and segment.layer == layer
    )


def at(
    program: StepProgram,
    hardware: Hardware,
    offloads: bool | Callable[[str], bool],
    window_bytes: int | None = None,
) -> Prediction:
    """Predict *program* with the slots that *offloads* picks by name leaving; all but the last
    layer's."""
    last, least = program.num_layers - 1, int(PyAOConfig(policy="all").min_bytes)
    leaves = [
        OUTSIDE < slot.layer < last
        and slot.nbytes >= least
        and (offloads(slot.name) if callable(offloads) else offloads)
        for slot in program.slots
    ]
    return predict(
        program, leaves, window_bytes=window_bytes, device=hardware.device, link=hardware.link
    )
