"""PyAO Figures 1, 4 and 5 and Table 1: memory of device and host over the micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from experiments import published
from experiments.experiment import Options
from experiments.predictor import ASSUMPTIONS, Predictor, card_limit_bytes, predictions
from experiments.rows import OK, OUT_OF_MEMORY, Result, Row
from experiments.systems import BASELINE, GIVEN, MODELS, PYAO_INT8, SYSTEMS

MICRO_BATCHES = {"opt": (1, 2, 4, 8, 10), "gpt2": (1, 2, 3, 4, 8, 10), "llama": (1, 2, 4, 5, 8)}
SHARES_AT = dict.fromkeys(MODELS, (1, 2, 3, 4))
MASTER_BYTES, MOMENT_BYTES = 4, 8
"""A parameter's float32 copy, and its two moments, on the host."""

ASSUMED = (
    *ASSUMPTIONS,
    "out of memory: what is no tensor included, more than 12 GiB less 4 %",
    "host: a fifth of float32 weights and of AdamW's moments (ZeRO over five nodes), and the host "
    "pool's peak; the process, its libraries, pinned gradient buffers and data are not counted",
)


def predict_device(options: Options) -> Result:
    """Predict peaks of the device for all systems, and the largest micro-batches."""
    rows: list[Row] = []
    for point in predictions(options, "Figure 4", MICRO_BATCHES, SYSTEMS):
        predicted = point.predicted
        if point.system.codec != "identity":
            peak_bytes, _ = point.predictor.counted(point.system, point.micro_batch)
            predicted = dataclasses.replace(predicted, peak_bytes=peak_bytes)
        fits = predicted.device_gb * 1e9 <= card_limit_bytes(point.predictor.hardware)
        rows.append(
            Row(
                **point.common,
                quantity="peak device memory",
                unit="GB",
                value=predicted.device_gb,
                published=published.DEVICE_PEAKS_GB.get(point.key),
                status=OK if fits else OUT_OF_MEMORY,
                detail={
                    "tensors_gb": predicted.peak_bytes / 1e9,
                    "step_ms": predicted.timed.step_ms,
                },
            )
        )
    if not options.is_smoke:
        for model in options.models:
            rows += _limits(model, Predictor(model))
    return Result(rows=rows, assumptions=ASSUMED)


def _limits(model: str, predictor: Predictor) -> Iterator[Row]:
    known = dict(zip((BASELINE.name, PYAO_INT8.name), published.MICRO_BATCHES[model], strict=True))
    for system in SYSTEMS:
        yield Row(
            model=MODELS[model],
            system=system.name,
            quantity="largest micro-batch in 8.68 GB of tensors",
            unit="samples",
            value=float(predictor.largest(system)),
            published=known.get(system.name),
            note="searched with identity" if system is PYAO_INT8 else "",
        )


def predict_host(options: Options) -> Result:
    """Predict peaks of the host for all systems, by component."""
    rows = []
    for point in predictions(options, "Figure 5", MICRO_BATCHES, SYSTEMS):
        share = point.predictor.num_parameters / published.NUM_NODES
        parts = {
            "float32 weights": share * MASTER_BYTES / 1e9,
            "optimizer states": share * MOMENT_BYTES / 1e9,
            "activations": point.predicted.host_bytes / 1e9,
        }
        rows.append(
            Row(
                **point.common,
                quantity="peak host memory",
                unit="GB",
                value=sum(parts.values()),
                published=published.HOST_PEAK_GB if point.key == published.HOST_PEAK_AT else None,
                detail=parts,
            )
        )
    return Result(rows=rows, assumptions=ASSUMED)


def predict_shares(options: Options) -> Result:
    """Predict activations' share of memory under ZeRO-2, and under the other systems."""
    # auto's peak follows what memory there is; with int8 it is that with identity, see Figure 4.
    systems = [system for system in GIVEN if options.is_smoke or system is not PYAO_INT8]
    rows = []
    for point in predictions(options, "Figure 1", SHARES_AT, systems):
        last = point.sizes[-1]
        slope_bytes = (
            point.predictor.predicted(point.system, last + 1).peak_bytes
            - point.predictor.predicted(point.system, last).peak_bytes
        )
        activations, total = slope_bytes * point.micro_batch / 1e9, point.predicted.device_gb
        is_papers = point.key == ("gpt2", BASELINE.name, 3)  # where its limit is
        others = "" if point.system is BASELINE else ", others"
        rows.append(
            Row(
                **point.common,
                quantity=f"activations' share{others}",
                unit="of the peak",
                value=activations / total,
                published=published.ACTIVATION_SHARE if is_papers else None,
                detail={"activations_gb": activations, "fixed_gb": total - activations},
            )
        )
    return Result(rows=rows, assumptions=ASSUMPTIONS)
