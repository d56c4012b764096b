"""Step-time overheads over keeping everything: ours beside the trace's arithmetic of time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hf_pyao.config import DEFAULT_WINDOW_BYTES
from hf_pyao.plan.hardware.speeds import GIB, DeviceModel, LinkModel
from hf_pyao.plan.paper.pyao_plan import paths_of, plan_of_rule, saved_by
from hf_pyao.plan.step.step_program import BACKWARD, FORWARD, StepProgram
from studies.published_rows import (
    MODELS,
    NAMES,
    PLACES,
    SEQUENCE_LENGTH,
    TRACE,
    Row,
    Steps,
    layer_ms,
    layer_operations,
    middle_layer_bytes,
    predict_plan,
)

POINTS = 2.0
SHARE = 0.03
_row = partial(Row, source=f"{TRACE}, time of a step", tolerance=SHARE)
COPY_ENGINES = (1, 2)

# What PyAO's rule flags by the paper's timing, as the trace drops it: activation, down projection.
FLAGGED = {
    "opt": ("activation_fn", "fc2"),
    "gpt2": ("mlp.act", "mlp.c_proj"),
    "llama": ("mlp.act_fn", "mlp", "mlp.down_proj"),
}
EARLY_STOP = (
    "torch's checkpoint stops recomputing when all saved tensors are there again: Llama's down "
    "projection, the last product of the layer, does not run a second time. The trace charges the "
    "whole forward (and, in backward, silu as several operations)"
)
SCHEDULE = (
    "the trace overlaps all copies of a layer with all of its compute. Here a copy starts when its "
    "tensor is saved, so that the link idles early in a layer and compute waits at its end; "
    "GPT-2's q, k, v share a storage, whose copy is queued when the layer ends. With a window of "
    "256 MiB, the default, layers do not wait for each other and this is gone"
)
SILU = (
    "the copies take the same time, but the step without them is shorter here: silu backward is "
    "one kernel on CUDA, several operations in the trace"
)
RULE_ON_H200 = (
    "as for policy all, the step without copies is shorter here (silu backward is one kernel), and "
    "the schedule within a layer is the engine's"
)
SILU_ACCESSES = 14
"""Reads and writes of tokens x intermediate size that the trace's silu backward has more."""
SILU_LAUNCHES = 5


@dataclass(frozen=True)
class Machine:
    """A device and its link."""

    name: str
    device: DeviceModel
    link_gb_per_s: float
    micro_batch: int

    def link(self, copy_engines: int) -> LinkModel:
        """Return the link, equally fast both ways."""
        speed = self.link_gb_per_s * 1e9 / GIB
        return LinkModel(d2h_gib_per_s=speed, h2d_gib_per_s=speed, copy_engines=copy_engines)

    def copy_ms(self, nbytes: float) -> float:
        """Return how long a copy takes."""
        return nbytes / (self.link_gb_per_s * 1e6)


def _device(tflop_per_s: float, gb_per_s: float) -> DeviceModel:
    return DeviceModel(
        tflop_per_s=tflop_per_s, memory_gib_per_s=gb_per_s * 1e9 / GIB, launch_us=3.0
    )


_ADA_GB_PER_S = 504 * 0.85
_H200 = _device(670, 4300 * 0.9)
MACHINES = (
    Machine("4070 at 50 TFLOP/s, link 25 GB/s", _device(50, _ADA_GB_PER_S), 25, 4),
    Machine("4070 at 29 TFLOP/s, link 25 GB/s", _device(29, _ADA_GB_PER_S), 25, 4),
    Machine("H200, link 50 GB/s", _H200, 50, 16),
    Machine("H200, link 25 GB/s", _H200, 25, 16),
)

# By machine: overheads in % of OPT, GPT-2, Llama.
CHECKPOINTING = ((30, 32, 24), (30, 31, 25), (30, 32, 24), (30, 32, 24))
OFFLOAD_ALL = ((0, 46, 7.7), (0, 16, 0), (245, 656, 278), (575, 1401, 629))
RULE = ((9.3, 16, 10.7), (9.4, 14, 11.6), (143, 143, 66), (372, 375, 205))
# A layer's forward in ms, its activation throughput in GB/s, the step in ms; per sample.
FORWARD_MS = ((1.19, 0.70, 1.66), (1.95, 1.00, 2.58), (0.095, 0.064, 0.142))
THROUGHPUT = ((23, 55, 34), (14, 38, 22), (286, 591, 392))
STEP_MS: tuple[tuple[float, float, float] | None, ...] = (
    (94.7, 78.9, 110.2),
    None,
    (7.61, 7.15, 9.51),
)
GFLOP: Mapping[str, tuple[float, float, float]] = {
    FORWARD: (52.6, 20.8, 63.4),
    BACKWARD: (105.8, 41.9, 127.2),
}


def overheads(steps: Steps, models: Sequence[str] = tuple(MODELS)) -> Iterator[Row]:
    """Yield times of a layer and of a step, and overheads over keeping everything."""
    for model in models:
        program = steps.record(MODELS[model], 4)
        for phase, published in GFLOP.items():
            flops = sum(operation.flops for operation in layer_operations(program, phase))
            figure = f"{NAMES[model]}, arithmetic of a layer, {phase}"
            yield _row(figure, "GFLOP", published[PLACES[model]], flops / 4e9)
    for number, machine in enumerate(MACHINES):
        for model in models:
            if number < len(FORWARD_MS):
                yield from _layer_rows(steps, model, machine, number)
            yield from _overhead_rows(steps, model, machine, number)


def _layer_rows(steps: Steps, model: str, machine: Machine, number: int) -> Iterator[Row]:
    program = steps.record(MODELS[model], machine.micro_batch)
    forward_ms = layer_ms(program, machine.device, FORWARD) / machine.micro_batch
    nbytes = middle_layer_bytes(program) / machine.micro_batch
    place, name = PLACES[model], f"{machine.name}: {NAMES[model]}"
    yield _row(f"{name}, forward of a layer", "ms", FORWARD_MS[number][place], forward_ms)
    yield _row(
        *(f"{name}, saved bytes over that time", "GB/s", THROUGHPUT[number][place]),
        nbytes / forward_ms / 1e6,
    )
    published = STEP_MS[number]
    if published is not None:
        kept_ms = predict_plan(program, offloads=False, device=machine.device).step_ms
        yield _row(
            *(f"{name}, a step that keeps all", "ms", published[place]),
            kept_ms / machine.micro_batch,
            SILU,
            (kept_ms + program.num_layers * _silu_ms(steps, model, machine)) / machine.micro_batch,
        )


def _overhead_rows(steps: Steps, model: str, machine: Machine, number: int) -> Iterator[Row]:
    size = machine.micro_batch
    kept = steps.record(MODELS[model], size)
    checkpointed = steps.record(MODELS[model], size, checkpointing=True)
    recomputed = _recomputed(steps, model, machine)
    base_ms = predict_plan(kept, offloads=False, device=machine.device).step_ms
    silu_ms = _silu_ms(steps, model, machine)
    traced_ms = base_ms + kept.num_layers * silu_ms
    forward_ms = kept.num_layers * layer_ms(kept, machine.device, FORWARD)
    everything = middle_layer_bytes(kept)
    dropped = [
        slot.name
        for slot in kept.slots
        if slot.layer == 1 and slot.name.rpartition(":")[0] in FLAGGED[model]
    ]
    left = everything - middle_layer_bytes(kept, dropped)
    again_ms = layer_ms(recomputed, machine.device, BACKWARD) - layer_ms(
        kept, machine.device, BACKWARD
    )
    silu = SILU if number >= 2 and model == "llama" else SCHEDULE
    for name, program, offloads, published, explanation, ideal_ms in (
        ("checkpointing", checkpointed, False, CHECKPOINTING, EARLY_STOP, forward_ms),
        (
            "policy all",
            kept,
            True,
            OFFLOAD_ALL,
            silu,
            _stall_ms(kept, machine, everything, 0, silu_ms),
        ),
        (
            *("PyAO's rule", recomputed, True, RULE, SCHEDULE if number < 2 else RULE_ON_H200),
            _stall_ms(kept, machine, left, again_ms, silu_ms),
        ),
    ):
        steps_ms = [
            predict_plan(
                program, offloads=offloads, device=machine.device, link=machine.link(engines)
            ).step_ms
            for engines in COPY_ENGINES
        ]
        assert steps_ms[0] == steps_ms[1], "the copy engines matter: show both"
        yield _row(
            f"{machine.name}: {NAMES[model]}, {name}",
            "%",
            published[number][PLACES[model]],
            100 * (steps_ms[0] / base_ms - 1),
            explanation,
            100 * ideal_ms / traced_ms,
            tolerance=POINTS,
        )


def window_overheads(steps: Steps, models: Sequence[str] = tuple(MODELS)) -> list[dict[str, Any]]:
    """Return overheads in %, with copies that meet at each layer's end, and the default window."""
    rows = []
    for machine in MACHINES:
        for model in models:
            kept = steps.record(MODELS[model], machine.micro_batch)
            recomputed = _recomputed(steps, model, machine)
            base_ms = predict_plan(kept, offloads=False, device=machine.device).step_ms
            for name, program in (("policy all", kept), ("PyAO's rule", recomputed)):
                row: dict[str, Any] = {"machine": machine.name, "model": model, "method": name}
                for window in ("layer", DEFAULT_WINDOW_BYTES):
                    predicted = predict_plan(
                        program,
                        offloads=True,
                        window=window,
                        device=machine.device,
                        link=machine.link(2),
                    )
                    row[f"window {window}"] = round(100 * (predicted.step_ms / base_ms - 1), 1)
                rows.append(row)
    return rows


def _recomputed(steps: Steps, model: str, machine: Machine) -> StepProgram:
    """Return the step in which what is flagged is recomputed, but in the last layer."""
    kept = steps.record(MODELS[model], machine.micro_batch)
    plan = plan_of_rule(FLAGGED[model], saved_by(kept), paths_of(kept))
    return steps.record(MODELS[model], machine.micro_batch, plan=plan, keep_last_layers=1)


def _stall_ms(
    program: StepProgram, machine: Machine, nbytes: int, again_ms: float, silu_ms: float = 0.0
) -> float:
    """Return what the trace adds to a step: layers that take the longer of compute and copies.

    Args:
        program: the step that keeps everything.
        machine: where.
        nbytes: what each layer but the last moves.
        again_ms: what each of them computes again.
        silu_ms: what its backward takes more in the trace.
    """
    copy_ms = machine.copy_ms(nbytes)
    forward_ms = layer_ms(program, machine.device, FORWARD)
    backward_ms = layer_ms(program, machine.device, BACKWARD) + silu_ms
    more_ms = max(0.0, copy_ms - forward_ms) + max(again_ms, copy_ms - backward_ms)
    return (program.num_layers - 1) * more_ms


def _silu_ms(steps: Steps, model: str, machine: Machine) -> float:
    """Return what silu backward of a layer takes more as several operations."""
    if model != "llama":
        return 0.0
    intermediate = steps.config(MODELS[model]).intermediate_size
    nbytes = 2 * machine.micro_batch * SEQUENCE_LENGTH * intermediate
    access_ms = nbytes / (machine.device.memory_gib_per_s * GIB) * 1e3
    return float(SILU_ACCESSES * access_ms + SILU_LAUNCHES * machine.device.launch_us / 1e3)
