"""PyAO Tables 2 and 3: what offloading costs, by component."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments import published
from experiments.experiment import Options
from experiments.predictor import (
    ASSUMPTIONS,
    Point,
    card_limit_bytes,
    on_compute_stream_ms,
    predictions,
)
from experiments.rows import NOT_PREDICTED, OK, Result, Row
from experiments.systems import (
    ACCUMULATION,
    AUTO,
    AUTO_CHUNKED,
    BASELINE,
    CHECKPOINTING,
    LONG_CONTEXT,
    OFFLOAD_ALL,
    OFFLOAD_ALL_INT8,
    PYAO,
    PYAO_CHUNKED,
    PYAO_INT8,
    System,
)
from hf_pyao.plan.hardware.speeds import GIB

COMPARED = (
    OFFLOAD_ALL,
    PYAO,
    OFFLOAD_ALL_INT8,
    PYAO_INT8,
    CHECKPOINTING,
    PYAO_CHUNKED,
    AUTO,
    AUTO_CHUNKED,
    LONG_CONTEXT,
    ACCUMULATION,
)
COMPONENTS = (
    "forward: waiting for copies",
    "forward: compression",
    "forward: tracing inputs",
    "backward: waiting for copies",
    "backward: decompression",
    "backward: recomputation",
)
UNLIMITED_BYTES = 2**60
CODEC = (
    "compression and decompression: one pass at the card's memory bandwidth that reads and writes "
    "each byte once. What the kernel takes beyond that is not predicted"
)


def predict_components(options: Options) -> Result:
    """Predict Table 2: each overhead of a step."""
    rows: list[Row] = []
    for point in _points(options, "Table 2", COMPARED):
        rows += _components(point)
    return Result(rows=rows, assumptions=[*ASSUMPTIONS, CODEC])


def _points(options: Options, what: str, systems: Sequence[System]) -> Iterator[Point]:
    """Yield *systems* at the paper's larger micro-batches; a smoke run counts no codec's bytes."""
    sizes = {model: (large,) for model, (_, large) in published.MICRO_BATCHES.items()}
    if options.is_smoke:
        systems = [system for system in systems if system.codec == "identity"]
    return predictions(options, what, sizes, systems, smoke=(2,))


def _components(point: Point) -> Iterator[Row]:
    predictor, system, predicted = point.predictor, point.system, point.predicted
    plain = predictor.predicted(BASELINE, point.micro_batch)
    codec_ms = 0.0
    if system.codec != "identity":
        exact = predictor.predicted(PYAO if system.is_selective else OFFLOAD_ALL, point.micro_batch)
        moved = predicted.timed.offloaded_bytes + exact.timed.offloaded_bytes
        codec_ms = moved / GIB / predictor.hardware.device.memory_gib_per_s * 1e3
    values: dict[str, float | None] = {
        COMPONENTS[0]: predicted.timed.stall_forward_ms,
        COMPONENTS[1]: codec_ms,
        COMPONENTS[2]: None if _traces(point) else 0.0,
        COMPONENTS[3]: predicted.timed.stall_backward_ms,
        COMPONENTS[4]: codec_ms,
        COMPONENTS[5]: predicted.timed.compute_ms - plain.timed.compute_ms,
    }
    for name, value in values.items():
        status = NOT_PREDICTED if value is None else OK
        yield Row(**point.common, unit="ms", quantity=name, value=value, status=status)
    yield Row(
        **point.common,
        unit="ms",
        quantity="step",
        value=plain.timed.step_ms + sum(value for value in values.values() if value is not None),
        detail={
            "recomputed": list(predicted.recomputed),
            "keep_all_ms": plain.timed.step_ms,
            "peak_gb": predicted.device_gb,
            "fits": predicted.device_gb * 1e9 <= card_limit_bytes(predictor.hardware),
        },
    )


def _traces(point: Point) -> bool:
    """Say whether the engine records layers, to compute something again."""
    if not point.system.is_auto:
        return bool(point.predicted.recomputed) and point.system.is_pyao
    kept = point.predictor.predicted(point.system, point.micro_batch, cap_bytes=UNLIMITED_BYTES)
    return point.predicted.timed.compute_ms > kept.timed.compute_ms


STREAMS = (PYAO, PYAO_INT8, PYAO_CHUNKED, OFFLOAD_ALL, CHECKPOINTING, ACCUMULATION)


def predict_streams(options: Options) -> Result:
    """Predict Table 3: copies on the compute stream, and on one of their own."""
    rows = []
    for point in _points(options, "Table 3", STREAMS):
        two_ms = point.predicted.timed.step_ms
        one_ms = on_compute_stream_ms(point.predicted, point.predictor.hardware)
        rows.append(
            Row(
                **point.common,
                quantity="step with two streams, less than with one",
                unit="of the step",
                value=1 - two_ms / one_ms,
                published=published.TWO_STREAMS_FASTER if point.system is PYAO_INT8 else None,
                detail={"one_ms": one_ms, "two_ms": two_ms},
            )
        )
    return Result(rows=rows, assumptions=ASSUMPTIONS)
