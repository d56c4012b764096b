"""PyAO Tables 2 and 3: what offloading costs, by component."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments import published
from experiments.experiment import Options
from experiments.page import bullets, paper, paragraph, table, table_of
from experiments.plots import grouped_bars
from experiments.predictor import (
    ASSUMPTIONS,
    Predicted,
    Predictor,
    card_limit_bytes,
    on_compute_stream_ms,
    predictors,
)
from experiments.rows import NOT_PREDICTED, Result, Row, one, select
from experiments.systems import (
    ACCUMULATION,
    AUTO,
    AUTO_CHUNKED,
    BASELINE,
    CHECKPOINTING,
    LONG_CONTEXT,
    MODELS,
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
    for model, predictor in predictors(options, "Table 2"):
        micro_batch = 2 if options.is_smoke else published.MICRO_BATCHES[model][1]
        plain = predictor.predicted(BASELINE, micro_batch)
        for system in COMPARED:
            if not (options.is_smoke and system.codec != "identity"):
                rows += _components(model, predictor, system, micro_batch, plain)
    return Result(rows=rows, assumptions=[*ASSUMPTIONS, CODEC])


def _components(
    model: str, predictor: Predictor, system: System, micro_batch: int, plain: Predicted
) -> Iterator[Row]:
    predicted = predictor.predicted(system, micro_batch)
    codec_ms = 0.0
    if system.codec != "identity":
        exact = predictor.predicted(_exact(system), micro_batch)
        moved = predicted.offloaded_bytes + exact.offloaded_bytes
        codec_ms = moved / GIB / predictor.hardware.device.memory_gib_per_s * 1e3
    values: dict[str, float | None] = {
        COMPONENTS[0]: predicted.stall_forward_ms,
        COMPONENTS[1]: codec_ms,
        COMPONENTS[2]: None if _traces(predictor, system, predicted, micro_batch) else 0.0,
        COMPONENTS[3]: predicted.stall_backward_ms,
        COMPONENTS[4]: codec_ms,
        COMPONENTS[5]: predicted.compute_ms - plain.compute_ms,
    }
    common: dict[str, Any] = {
        "model": MODELS[model],
        "system": system.name,
        "micro_batch": micro_batch,
        "unit": "ms",
    }
    for name, value in values.items():
        status = NOT_PREDICTED if value is None else "ok"
        yield Row(**common, quantity=name, value=value, status=status)
    yield Row(
        **common,
        quantity="step",
        value=plain.step_ms + sum(value for value in values.values() if value is not None),
        detail={
            "recomputed": list(predicted.recomputed),
            "keep_all_ms": plain.step_ms,
            "peak_gb": predicted.device_gb,
            "fits": predicted.device_gb * 1e9 <= card_limit_bytes(predictor.hardware),
        },
    )


def _traces(predictor: Predictor, system: System, predicted: Predicted, micro_batch: int) -> bool:
    """Say whether the engine records layers, to compute something again."""
    if not system.is_auto:
        return bool(predicted.recomputed) and system.is_pyao
    kept = predictor.predicted(system, micro_batch, cap_bytes=UNLIMITED_BYTES)
    return predicted.compute_ms > kept.compute_ms


def _exact(system: System) -> System:
    return PYAO if system.is_selective else OFFLOAD_ALL


def predicted_components(found: dict[str, Any]) -> list[str]:
    """Write of Table 2, predicted."""
    rows = []
    for name in MODELS.values():
        for system in COMPARED:
            cells = [name, system.name]
            for part in (*COMPONENTS, "step"):
                row = one(found["rows"], model=name, system=system.name, quantity=part)
                cells.append("–" if row["value"] is None else f"{row['value']:.1f}")
            peak = f"{row['detail']['peak_gb']:.2f}" + " OOM" * (not row["detail"]["fits"])
            rows.append([*cells, peak])
    steps = select(found["rows"], quantity="step", system=PYAO.name)
    flagged = "; ".join(
        f"{row['model']}: {', '.join(row['detail']['recomputed']) or 'nothing'}" for row in steps
    )
    return [
        paragraph(
            "*Mode: predict.* Milliseconds of one micro-batch (10, 10 and 5), without "
            "communication and optimizer. The table's cells are not in the paper's text; a dash: "
            "not predicted. Recomputation is what compute takes beyond keeping everything, with "
            "the chunked loss also what that costs. The peak is the device's, GB; `auto` plans for "
            "the card's memory, others take the same on any card."
        ),
        table(["model", "system", *COMPONENTS, "step", "peak"], rows),
        paragraph(
            f"The paper: offloading everything is {published.OFFLOAD_ALL_SLOWER:.0%} slower than "
            f"selective recomputation. Ours, OPT, GPT-2, Llama: "
            f"{_longer(found, OFFLOAD_ALL, PYAO)} (identity), "
            f"{_longer(found, OFFLOAD_ALL_INT8, PYAO_INT8)} (int8)."
        ),
        "Why they differ:",
        bullets(
            [
                f"What the rule flags ({flagged}) depends on what an interval between two packs "
                "holds (hf_pyao/plan/README.md).",
                f"In half precision recomputation adds, and waiting loses, OPT, GPT-2, Llama: "
                f"{_traded(found)} ms. Where the first is more, offloading everything is faster "
                "on this link.",
                "The paper's waiting is longer in backward, where gradients leave over the same "
                "copy engine and share host memory (its section 8.2); the predictor has no copies "
                "of gradients. Tracing inputs is the host's time and is not predicted.",
                "Checkpointing recomputes all and waits for nothing.",
                "Long context runs layers again too, MLPs in tiles, attention not, and offloads "
                "the layers' inputs and what attention returns: the lowest peaks of the table. At "
                "so few tokens the chunked loss is most of that. Against checkpointing the step "
                f"differs by {_longer(found, LONG_CONTEXT, CHECKPOINTING)} (OPT, GPT-2, Llama): "
                "a tile's backward begins with all of "
                "its forward, where dropout follows an MLP the layer runs that too, weights' "
                "gradients are summed tile by tile, and the loss is chunked.",
                "`auto` keeps what the card has room for, and offloads or recomputes the rest, "
                "whichever costs less.",
            ]
        ),
    ]


def _traded(document: dict[str, Any]) -> str:
    """Say what recomputation adds and waiting loses, for each model."""

    def total(model: str, system: System, *parts: str) -> float:
        rows = document["rows"]
        found = (one(rows, model=model, system=system.name, quantity=part) for part in parts)
        return sum(float(row["value"]) for row in found)

    waiting = (COMPONENTS[0], COMPONENTS[3])
    return ", ".join(
        f"{total(name, PYAO, COMPONENTS[5]):.1f} and "
        f"{total(name, OFFLOAD_ALL, *waiting) - total(name, PYAO, *waiting):.1f}"
        for name in MODELS.values()
    )


def _longer(document: dict[str, Any], system: System, other: System) -> str:
    """Say by how much a step of *system* is longer than one of *other*, for each model."""
    ratios = []
    for name in MODELS.values():
        step, base = (
            one(document["rows"], model=name, system=each.name, quantity="step")["value"]
            for each in (system, other)
        )
        ratios.append(f"{step / base - 1:+.1%}")
    return ", ".join(ratios)


# ---- Table 3 -------------------------------------------------------------------------------------

STREAM_METHODS = {
    "one stream": "pyao-single-stream",
    "two streams": "pyao-one-copy-stream",
    "a stream each way": "pyao-window",
}
STREAMS = (PYAO, PYAO_INT8, PYAO_CHUNKED, OFFLOAD_ALL, CHECKPOINTING, ACCUMULATION)


def predict_streams(options: Options) -> Result:
    """Predict Table 3: copies on the compute stream, and on one of their own."""
    rows = []
    for model, predictor in predictors(options, "Table 3"):
        micro_batch = 2 if options.is_smoke else published.MICRO_BATCHES[model][1]
        for system in STREAMS:
            if options.is_smoke and system.codec != "identity":
                continue
            predicted = predictor.predicted(system, micro_batch)
            one_stream = on_compute_stream_ms(predicted, predictor.hardware)
            rows.append(
                Row(
                    model=MODELS[model],
                    system=system.name,
                    micro_batch=micro_batch,
                    quantity="step with two streams, less than with one",
                    unit="of the step",
                    value=1 - predicted.step_ms / one_stream,
                    published=published.TWO_STREAMS_FASTER if system is PYAO_INT8 else None,
                    detail={"one_ms": one_stream, "two_ms": predicted.step_ms},
                )
            )
    return Result(rows=rows, assumptions=ASSUMPTIONS)


def predicted_streams(found: dict[str, Any]) -> list[str]:
    """Write of Table 3, predicted."""
    return [
        paragraph(
            "*Mode: predict.* Milliseconds of a micro-batch with copies on the compute stream, "
            "and on a stream of their own; one copy engine. The paper's text gives one figure, "
            "without its model."
        ),
        table_of(
            found["rows"],
            ("model", "{model}"),
            ("system", "{system}"),
            ("one stream", "{detail[one_ms]:.1f}"),
            ("two streams", "{detail[two_ms]:.1f}"),
            ("less by", "{value:.1%}"),
            ("paper", paper("{published:.0%}")),
        ),
        bullets(
            [
                "The paper's step has more in it that no stream shortens (gradient copies, the "
                "codec's kernels, the optimizer), so that its gain is a smaller share.",
                "tests/helpers/simulation/README.md has the same on the simulated device with "
                "gradients that leave in backward.",
                "Checkpointing and accumulation copy nothing: one stream is enough.",
            ]
        ),
    ]


def plot_components(document: dict[str, Any]) -> Any:
    """Draw Table 2's steps as bars."""
    rows = select(document["rows"], quantity="step")
    return grouped_bars(
        [(row["model"], row["system"], row["value"]) for row in rows], "ms of a micro-batch"
    )


def plot_streams(document: dict[str, Any]) -> Any:
    """Draw Table 3 as bars."""
    bars = []
    for row in select(document["rows"], system=PYAO_INT8.name):
        bars.append((row["model"], "one stream", row["detail"]["one_ms"]))
        bars.append((row["model"], "two streams", row["detail"]["two_ms"]))
    return grouped_bars(bars, "ms of a micro-batch, int8")
