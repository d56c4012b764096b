"""PyAO Figures 1, 4 and 5 and Table 1: memory of device and host over the micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from experiments import published
from experiments.experiment import Options, progress
from experiments.predictor import (
    ASSUMPTIONS,
    Predicted,
    Predictor,
    card_limit_bytes,
    predictors,
)
from experiments.rows import OK, OUT_OF_MEMORY, Result, Row
from experiments.systems import BASELINE, GIVEN, MODELS, PYAO_INT8, SYSTEMS, System

MICRO_BATCHES = {"opt": (1, 2, 4, 8, 10), "gpt2": (1, 2, 3, 4, 8, 10), "llama": (1, 2, 4, 5, 8)}
SMOKE_MICRO_BATCHES = (1, 2)
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
    limits: list[Row] = []
    for model, predictor in predictors(options, "Figure 4"):
        limit_gb = card_limit_bytes(predictor.hardware) / 1e9
        for system, micro_batch, predicted in _each(options, model, predictor):
            if system.codec != "identity":
                peak_bytes, _ = predictor.counted(system, micro_batch)
                predicted = dataclasses.replace(predicted, peak_bytes=peak_bytes)
            rows.append(
                Row(
                    model=MODELS[model],
                    system=system.name,
                    micro_batch=micro_batch,
                    quantity="peak device memory",
                    unit="GB",
                    value=predicted.device_gb,
                    published=published.DEVICE_PEAKS_GB.get((model, system.name, micro_batch)),
                    status=OK if predicted.device_gb <= limit_gb else OUT_OF_MEMORY,
                    detail={"tensors_gb": predicted.peak_bytes / 1e9, "step_ms": predicted.step_ms},
                )
            )
        if not options.is_smoke:
            limits += _limits(model, Predictor(model))
    return Result(rows=[*rows, *limits], assumptions=ASSUMED)


def predict_host(options: Options) -> Result:
    """Predict peaks of the host for all systems, by component."""
    rows = []
    for model, predictor in predictors(options, "Figure 5"):
        share = predictor.num_parameters / published.NUM_NODES
        for system, micro_batch, predicted in _each(options, model, predictor):
            parts = {
                "float32 weights": share * MASTER_BYTES / 1e9,
                "optimizer states": share * MOMENT_BYTES / 1e9,
                "activations": predicted.host_bytes / 1e9,
            }
            papers = published.HOST_PEAK_GB.get((model, micro_batch))
            rows.append(
                Row(
                    model=MODELS[model],
                    system=system.name,
                    micro_batch=micro_batch,
                    quantity="peak host memory",
                    unit="GB",
                    value=sum(parts.values()),
                    published=papers if system is PYAO_INT8 else None,
                    detail=parts,
                )
            )
    return Result(rows=rows, assumptions=ASSUMED)


def _each(
    options: Options, model: str, predictor: Predictor
) -> Iterator[tuple[System, int, Predicted]]:
    sizes = SMOKE_MICRO_BATCHES if options.is_smoke else MICRO_BATCHES[model]
    for micro_batch in progress(sizes, model):
        for system in SYSTEMS:
            yield system, micro_batch, predictor.predicted(system, micro_batch)


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


def predict_shares(options: Options) -> Result:
    """Predict activations' share of memory under ZeRO-2, and under the other systems."""
    rows = []
    for model, predictor in predictors(options, "Figure 1"):
        sizes = SMOKE_MICRO_BATCHES if options.is_smoke else (1, 2, 3, 4)
        for system in GIVEN:  # auto's peak follows what memory there is
            if system is PYAO_INT8 and not options.is_smoke:
                continue  # the same peak as with identity, see Figure 4
            for micro_batch in sizes:
                slope = (
                    predictor.predicted(system, sizes[-1] + 1).peak_bytes
                    - predictor.predicted(system, sizes[-1]).peak_bytes
                )
                total = predictor.predicted(system, micro_batch).device_gb
                activations = slope * micro_batch / 1e9
                is_papers = (
                    system is BASELINE and model == "gpt2" and micro_batch == 3
                )  # where its limit is
                rows.append(
                    Row(
                        model=MODELS[model],
                        system=system.name,
                        micro_batch=micro_batch,
                        quantity="activations' share"
                        if system is BASELINE
                        else "activations' share, others",
                        unit="of the peak",
                        value=activations / total,
                        published=published.ACTIVATION_SHARE if is_papers else None,
                        detail={"activations_gb": activations, "fixed_gb": total - activations},
                    )
                )
    return Result(rows=rows, assumptions=ASSUMPTIONS)
