"""PyAO Figure 2: activation throughput of the parts of a layer."""

from __future__ import annotations

from collections import defaultdict

from experiments import published
from experiments.experiment import Options
from experiments.predictor import ASSUMPTIONS, predictors
from experiments.rows import Result, Row
from experiments.systems import BASELINE, MODELS
from hf_pyao.plan.hardware.speeds import GIB, DeviceModel
from hf_pyao.plan.measure.activation_throughput import by_pack_intervals
from hf_pyao.plan.paper.iqr import find_outliers
from hf_pyao.plan.step.step_program import FORWARD, StepProgram

TIMINGS = ("the paper's intervals", "device time")


def by_device_time(program: StepProgram, device: DeviceModel, layer: int = 1) -> dict[str, float]:
    """Return the throughput of each sub-module by what its own operations take, in GiB/s.

    Args:
        program: the step; each distinct storage counts once.
        device: speeds.
        layer: which layer; a middle one stands for all.
    """
    times_ms: defaultdict[str, float] = defaultdict(float)
    for segment in program.segments:
        if segment.phase == FORWARD and segment.layer == layer:
            for operation in program.operations[segment.start : segment.end]:
                if operation.is_kernel:
                    times_ms[operation.path] += device.op_ms(
                        operation.flops, operation.traffic_bytes
                    )
    slots = [each for each in program.slots if each.layer == layer and each.stays is None]
    nbytes: defaultdict[str, int] = defaultdict(int)
    for slot in slots:
        nbytes[slot.name.rpartition(":")[0]] += slot.nbytes
    return {
        path: count / GIB / (times_ms[path] / 1e3)
        for path, count in nbytes.items()
        if times_ms[path] > 0
    }


def predict_throughput(options: Options) -> Result:
    """Predict Figure 2: activation throughput of the parts of a layer."""
    rows = []
    for model, predictor in predictors(options, "Figure 2"):
        micro_batch = 2 if options.is_smoke else published.MICRO_BATCHES[model][0]
        program = predictor.program(BASELINE, micro_batch)
        hardware = predictor.hardware
        for timing, rule in zip(TIMINGS, (by_pack_intervals, by_device_time), strict=True):
            rates = rule(program, hardware.device)
            outliers = find_outliers(rates, hardware.link.d2h_gib_per_s)
            for part, rate in rates.items():
                rows.append(
                    Row(
                        model=MODELS[model],
                        system=part or "(the layer itself)",
                        micro_batch=micro_batch,
                        quantity=f"activation throughput, {timing}",
                        unit="GB/s",
                        value=rate * GIB / 1e9,
                        detail={
                            "is_flagged": part in outliers.flagged,
                            "bound_gb_per_s": outliers.upper_bound_gib_per_s * GIB / 1e9,
                        },
                    )
                )
    return Result(
        rows=rows,
        assumptions=[*ASSUMPTIONS, "15 us of the host from one pack hook to the next"],
    )
