"""The time of each operation of a step, from a profile: measured, or assumed.

A profile measures sub-modules, and a step has operations. What a sub-module takes by itself is
shared out among its operations in proportion to what they would cost on an ordinary device
(:data:`REFERENCE`); what lies between sub-modules is the rest of the layer. Times in which compute
waited for copies are taken out first: the predictor computes those.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from hf_pyao.plan.documents.profile import Profile, Spread
from hf_pyao.plan.documents.schema import ReportError
from hf_pyao.plan.hardware.speeds import GIB, DeviceModel
from hf_pyao.plan.predict.predict import operation_times_ms
from hf_pyao.plan.step.collectives import with_collectives, without_collectives
from hf_pyao.plan.step.recorded_step import RecordedStep
from hf_pyao.plan.step.step_program import (
    BACKWARD,
    FORWARD,
    OUTSIDE,
    Operation,
    Segment,
    StepProgram,
)

REFERENCE = DeviceModel(tflop_per_s=50.0, memory_gib_per_s=400.0, launch_us=3.0)
"""In which proportion the operations of one sub-module share its time."""

LEAST_SHARE = 0.02
"""Least share of a layer that what lies between its sub-modules gets: marks are not exact."""


def times_of(profile: Profile, program: StepProgram) -> list[float]:
    """Return what each operation of *program* takes, in ms.

    Args:
        profile: of the same step, measured or predicted.
        program: its step, whole.
    """
    if profile.speeds is not None:
        return operation_times_ms(program, device_of(profile.speeds))
    times_ms = _compute_times_of(profile, program)
    return with_collectives(times_ms, program.operations, profile.collective_gib_per_s)


def _compute_times_of(profile: Profile, program: StepProgram) -> list[float]:
    """Return what each operation takes, but collectives, which take no compute."""
    costs_ms = operation_times_ms(program, REFERENCE)
    times_ms = list(costs_ms)
    ratios = []
    for phase, layer_ms in (
        (FORWARD, _compute_ms(profile.layer_forward, profile, FORWARD)),
        (BACKWARD, _compute_ms(profile.layer_backward, profile, BACKWARD)),
    ):
        if layer_ms is None:
            continue
        own_ms = _own_ms(profile, phase)
        for numbers in _layers(program, phase):
            before_ms = sum(costs_ms[number] for number in numbers)
            _share_out(program, numbers, costs_ms, own_ms, layer_ms, times_ms)
            if before_ms:
                ratios.append(layer_ms / before_ms)
    slower = sum(ratios) / len(ratios) if ratios else 1.0
    head = list(_head(program))
    head_ms = sum(costs_ms[number] for number in head)
    for segment in program.segments:
        if segment.layer == OUTSIDE:
            for number in range(segment.start, segment.end):
                times_ms[number] = costs_ms[number] * slower
    if profile.head is not None and head_ms:
        measured_ms = profile.head.mean_ms
        waited_ms = profile.metrics.get("stall_head_ms", 0.0)
        measured_ms = max(measured_ms - waited_ms, LEAST_SHARE * measured_ms)
        for number in head:
            times_ms[number] = costs_ms[number] * measured_ms / head_ms
    return times_ms


def times_like(times_ms: Sequence[float], before: StepProgram, after: StepProgram) -> list[float]:
    """Return what each operation of *after* takes, by what those of *before* take.

    The same step with other levers runs operations of the same kinds. One takes as much longer than
    on an ordinary device as those of its name, sub-module and size do in *before*; or else those of
    its name and size, of its name, or all.

    Args:
        times_ms: of each operation of *before*.
        before: a step.
        after: the same step with other levers.
    """
    costs_ms = operation_times_ms(before, REFERENCE)
    sums: defaultdict[tuple[object, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for operation, elapsed_ms, cost_ms in zip(
        before.operations, without_collectives(times_ms, before.operations), costs_ms, strict=True
    ):
        for key in _kinds(operation):
            sums[key][0] += elapsed_ms
            sums[key][1] += cost_ms
    speed = _collective_speed(before, times_ms)

    def ratio_of(operation: Operation) -> float:
        for key in _kinds(operation):
            elapsed_ms, cost_ms = sums.get(key, (0.0, 0.0))
            if cost_ms > 0:
                return elapsed_ms / cost_ms
        return 1.0

    return with_collectives(
        [
            cost_ms * ratio_of(operation)
            for operation, cost_ms in zip(
                after.operations, operation_times_ms(after, REFERENCE), strict=True
            )
        ],
        after.operations,
        speed,
    )


def _collective_speed(program: StepProgram, times_ms: Sequence[float]) -> float | None:
    """Return the speed of the interconnect that *times_ms* are at, in GiB/s; None if of none."""
    taken = [
        (operation.collective.nbytes, elapsed_ms)
        for operation, elapsed_ms in zip(program.operations, times_ms, strict=True)
        if operation.collective is not None
    ]
    total_ms = sum(elapsed_ms for _, elapsed_ms in taken)
    return sum(nbytes for nbytes, _ in taken) / GIB / total_ms * 1e3 if total_ms else None


def _kinds(operation: Operation) -> tuple[tuple[object, ...], ...]:
    """Return what an operation has in common with others, the most telling first."""
    name, size = operation.name, (operation.flops, operation.traffic_bytes)
    return (name, operation.path, *size), (name, *size), (name,), ()


def at_other_size(profile: Profile, before: StepProgram, after: RecordedStep) -> Profile:
    """Return *profile* as it would be for a step of another size: times in proportion to costs.

    Args:
        profile: measured.
        before: its step, whole.
        after: the other step, as it was recorded.
    """
    costs_ms = [sum(operation_times_ms(each, REFERENCE)) for each in (before, after.whole())]
    ratio = costs_ms[1] / costs_ms[0] if costs_ms[0] else 1.0

    def scaled(spread: Spread | None) -> Spread | None:
        if spread is None:
            return None
        return Spread(
            mean_ms=spread.mean_ms * ratio,
            least_ms=spread.least_ms * ratio,
            most_ms=spread.most_ms * ratio,
        )

    stalls = {key: value * ratio for key, value in profile.metrics.items() if "stall_" in key}
    return dataclasses.replace(
        profile,
        layer_forward=scaled(profile.layer_forward),
        layer_backward=scaled(profile.layer_backward),
        head=scaled(profile.head),
        modules=[
            dataclasses.replace(each, forward=scaled(each.forward), backward=scaled(each.backward))
            for each in profile.modules
        ],
        metrics={**profile.metrics, **stalls},
        program=after.to_dict(),
    )


def device_of(speeds: Mapping[str, float]) -> DeviceModel:
    """Return the device that a predicted profile assumes.

    Raises:
        ReportError: one of its speeds is missing, or none.
    """
    for name, least in (("tflop_per_s", 1e-9), ("memory_gib_per_s", 1e-9), ("launch_us", 0.0)):
        if not speeds.get(name, -1.0) >= least:
            raise ReportError(
                f"the profile is damaged: of the speeds that it assumes, {name} is "
                f"{speeds.get(name)}. Make it anew.",
                key="file-damaged",
            )
    return DeviceModel(
        tflop_per_s=speeds["tflop_per_s"],
        memory_gib_per_s=speeds["memory_gib_per_s"],
        launch_us=speeds["launch_us"],
        collective_gib_per_s=speeds.get("collective_gib_per_s"),
    )


def speeds_of(device: DeviceModel) -> dict[str, float]:
    """Return *device* as a profile holds it."""
    speeds = {
        "tflop_per_s": device.tflop_per_s,
        "memory_gib_per_s": device.memory_gib_per_s,
        "launch_us": device.launch_us,
    }
    if device.collective_gib_per_s is not None:
        speeds["collective_gib_per_s"] = device.collective_gib_per_s
    return speeds


def _compute_ms(spread: Spread | None, profile: Profile, phase: str) -> float | None:
    """Return a layer's time without what it waited for copies."""
    if spread is None:
        return None
    stall_ms = profile.metrics.get(f"stall_{phase}_ms", 0.0) / max(1, len(profile.layer_names))
    return max(spread.mean_ms - stall_ms, LEAST_SHARE * spread.mean_ms)


def _own_ms(profile: Profile, phase: str) -> dict[str, float]:
    """Return each sub-module's time without that of the sub-modules in it."""
    total_ms = {
        module.path: spread.mean_ms
        for module in profile.modules
        if module.path
        and (spread := module.forward if phase == FORWARD else module.backward) is not None
    }
    own_ms = dict(total_ms)
    for path, elapsed_ms in total_ms.items():
        parent = _parent(path, total_ms)
        if parent:
            own_ms[parent] -= elapsed_ms
    return {path: max(0.0, elapsed_ms) for path, elapsed_ms in own_ms.items()}


def _parent(path: str, known: Iterable[str]) -> str:
    """Return the nearest of *known* that *path* is in; empty if that is the layer."""
    found = set(known)
    while "." in path:
        path = path.rpartition(".")[0]
        if path in found:
            return path
    return ""


def _layers(program: StepProgram, phase: str) -> list[list[int]]:
    """Return the operations of each layer in a phase."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for segment in program.segments:
        if segment.phase == phase and segment.layer != OUTSIDE:
            found[segment.layer] += range(segment.start, segment.end)
    return list(found.values())


def _share_out(
    program: StepProgram,
    numbers: list[int],
    costs_ms: list[float],
    own_ms: Mapping[str, float],
    layer_ms: float,
    times_ms: list[float],
) -> None:
    """Give the operations of one layer its time."""
    by_part: defaultdict[str, list[int]] = defaultdict(list)
    for number in numbers:
        path = program.operations[number].path
        by_part[path if path in own_ms else _parent(path, own_ms)].append(number)
    wanted_ms = {
        path: own_ms[path] for path in by_part if path and sum(costs_ms[n] for n in by_part[path])
    }
    rest = [number for path, part in by_part.items() if path not in wanted_ms for number in part]
    rest_ms = 0.0
    if any(costs_ms[number] for number in rest):
        rest_ms = max(layer_ms - sum(wanted_ms.values()), LEAST_SHARE * layer_ms)
    all_ms = sum(wanted_ms.values()) + rest_ms
    scale = layer_ms / all_ms if all_ms else 0.0
    for part, part_ms in (*((by_part[p], ms) for p, ms in wanted_ms.items()), (rest, rest_ms)):
        cost_ms = sum(costs_ms[number] for number in part)
        for number in part:
            times_ms[number] = costs_ms[number] / cost_ms * part_ms * scale if cost_ms else 0.0


def _head(program: StepProgram) -> Iterable[int]:
    """Yield the operations between the last layer's forward and the first backward of a layer."""
    is_behind = False
    for segment in program.segments:
        if segment.layer != OUTSIDE:
            if segment.phase == BACKWARD:
                return
            is_behind = segment.layer == program.num_layers - 1
        elif is_behind:
            yield from _range(segment)


def _range(segment: Segment) -> range:
    return range(segment.start, segment.end)
