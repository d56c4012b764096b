"""Activation throughput of the parts of a layer (PyAO paper, sections 3.4 and 5.5, Figure 2).

[Note: What an interval holds]
The paper times from one pack hook to the next, and divides what is saved by that. A projection
saves its input before its matrix product runs, so the product is in the interval of the part that
saves next. By these intervals the rule flags parts that save much right after something that took
no time, not parts that compute little.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean

from hf_pyao.plan.hardware.speeds import GIB, DeviceModel
from hf_pyao.plan.step.step_program import FORWARD, StepProgram

HOST_COST_US = 15.0
"""What the host takes from one pack hook to the next, whatever the device does: interpreter, hook
and launch. An assumption, for predicted intervals alone."""


def by_pack_intervals(
    program: StepProgram, device: DeviceModel, layer: int = 1
) -> dict[str, float]:
    """Return the throughput of each sub-module as the paper times it, in GiB/s.

    The first interval of a sub-module begins when it starts; throughputs of intervals are averaged
    over the sub-module. See [Note: What an interval holds].

    Args:
        program: the step; every saved tensor counts, as often as it is saved.
        device: speeds.
        layer: which layer, of the first two; the second stands for those between.
    """
    ends_ms = _ends_ms(program, device)
    starts = _starts(program, layer)
    rates: defaultdict[str, list[float]] = defaultdict(list)
    before_ms = 0.0
    for pack in program.packs:
        if pack.layer != layer:
            continue
        begin_ms = max(before_ms, ends_ms[min(starts.get(pack.path, pack.at), pack.at)])
        elapsed_ms = ends_ms[pack.at] - begin_ms + HOST_COST_US / 1e3
        rates[pack.path].append(pack.nbytes / GIB / (elapsed_ms / 1e3))
        before_ms = ends_ms[pack.at]
    return {path: fmean(values) for path, values in rates.items()}


def _ends_ms(program: StepProgram, device: DeviceModel) -> list[float]:
    """Return when each operation starts, in ms: entry n is when the first n have ended."""
    now_ms, ends_ms = 0.0, [0.0]
    for operation in program.operations:
        if operation.is_kernel:
            now_ms += device.op_ms(operation.flops, operation.traffic_bytes)
        ends_ms.append(now_ms)
    return ends_ms


def _starts(program: StepProgram, layer: int) -> dict[str, int]:
    """Return the first operation of each sub-module in the layer's forward."""
    starts: dict[str, int] = {}
    for segment in program.segments:
        if segment.phase == FORWARD and segment.layer == layer:
            for number in range(segment.start, segment.end):
                starts.setdefault(program.operations[number].path, number)
    return starts
