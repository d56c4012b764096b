"""Peaks over the micro-batch: slopes, intercepts, the largest that fits; ours and the trace's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hf_pyao.levers import Levers
from hf_pyao.plan.predictor.largest import largest_on_a_line
from studies.published_rows import (
    MODELS,
    NAMES,
    PLACES,
    SEQUENCE_LENGTH,
    TRACE,
    Row,
    Steps,
    predict_plan,
)

GB = 1e9
LIMIT_BYTES = int(12 * 2**30 * 0.96)
"""12 GiB less 4 %."""
TOLERANCE = 0.03
_row = partial(Row, source=f"{TRACE}, peak over the micro-batch", tolerance=TOLERANCE)
BUCKET_GB = 1.0
EQUAL = (4, 8, 16)
"""Micro-batches whose peaks are compared."""

SUM_IN_FLOAT32 = (
    "the chunked loss sums the head's gradient in float32 and rounds once, in backward: one buffer "
    "of vocabulary x hidden in half precision more while all activations are there. The trace's "
    "fused loss rounds after every chunk"
)
SILU = (
    "CUDA takes silu backward in one kernel, and so does the recorded step; the trace ran it as "
    "several operations, with two more tensors of tokens x 8192 at the peak"
)
TIED = (
    "at small micro-batches the trace's peak is at the end of backward, where the tied embedding's "
    "gradient, the head's and their sum are there; the chunked loss adds the one to the other in "
    "place, in blocks. At large ones, silu backward (as in the row of policy all)"
)
FLATTER = (
    "the trace's line goes through micro-batches 4 and 16; at 4 other tensors set its peak than at "
    "the end of the line, so that it is too flat and reaches too far. Ours is searched for"
)


@dataclass(frozen=True)
class Line:
    """peak = intercept + slope x micro-batch, in GB."""

    slope: float
    intercept: float

    def at(self, micro_batch: int) -> float:
        """Return the peak."""
        return self.intercept + self.slope * micro_batch

    @property
    def largest(self) -> int:
        """The largest micro-batch within the limit."""
        return int((LIMIT_BYTES / GB - self.intercept) / self.slope)


@dataclass(frozen=True)
class Way:
    """A way to train."""

    name: str
    offloads: bool = False
    checkpointing: bool = False
    head_loss: str = "off"
    ends: tuple[int, int] = (8, 16)
    """The micro-batches that the trace's line goes through."""


WAYS = (
    Way("none"),
    Way("checkpointing", checkpointing=True),
    Way("policy all", offloads=True),
    Way("none, chunked loss", head_loss="chunked", ends=(4, 16)),
    Way("checkpointing, chunked loss", checkpointing=True, head_loss="chunked", ends=(4, 16)),
    Way("policy all, chunked loss", offloads=True, head_loss="chunked", ends=(64, 128)),
)
NONE, _, ALL, _, _, ALL_CHUNKED = WAYS

# By way: slope and intercept in GB, largest micro-batch; for each of OPT, GPT-2, Llama.
LINES: Mapping[str, tuple[tuple[float, float, int], ...]] = {
    "none": ((1.021, 3.63, 8), (1.734, 2.55, 5), (1.818, 3.47, 4)),
    "checkpointing": ((0.415, 3.63, 21), (0.411, 2.55, 23), (0.961, 3.47, 9)),
    "policy all": ((0.392, 3.63, 22), (0.402, 2.55, 24), (0.983, 3.47, 9)),
    "none, chunked loss": ((0.673, 3.85, 12), (1.382, 2.68, 7), (0.928, 4.00, 9)),
    "checkpointing, chunked loss": ((0.090, 3.89, 93), (0.096, 2.68, 101), (0.082, 4.72, 93)),
    "policy all, chunked loss": ((0.073, 3.84, 117), (0.088, 2.68, 110), (0.149, 4.00, 56)),
}
# Peaks in GB at micro-batches 4, 8, 16.
PEAKS: Mapping[str, tuple[tuple[float, float, float], ...]] = {
    "none": ((7.71, 11.80, 19.96), (9.48, 16.42, 30.29), (10.74, 18.02, 32.56)),
    "policy all": ((5.20, 6.77, 9.90), (4.15, 5.76, 8.97), (7.41, 11.34, 19.21)),
    "policy all, chunked loss": ((4.25, 4.50, 5.00), (3.03, 3.38, 4.08), (5.05, 5.49, 6.38)),
}


def peak_gb(steps: Steps, model: str, way: Way, micro_batch: int) -> float:
    """Return the peak of a step, in GB: the same for every link."""
    program = steps.record(
        MODELS[model],
        micro_batch,
        checkpointing=way.checkpointing,
        levers=Levers(head_loss=way.head_loss),
    )
    return predict_plan(program, offloads=way.offloads).peak_bytes / GB


def line_of(steps: Steps, model: str, way: Way) -> Line:
    """Return the line through the peaks at the ends of *way*."""
    low, high = way.ends
    return _through(low, peak_gb(steps, model, way, low), high, peak_gb(steps, model, way, high))


def peaks(steps: Steps, models: Sequence[str] = tuple(MODELS)) -> Iterator[Row]:
    """Yield slopes, intercepts, largest micro-batches and peaks, ZeRO-2 with AdamW on the host."""
    for way in WAYS:
        for model in models:
            yield from _line_rows(steps, model, way)
    for name, published in PEAKS.items():
        way = next(each for each in WAYS if each.name == name)
        for model in models:
            for micro_batch, peak in zip(EQUAL, published[PLACES[model]], strict=True):
                yield _peak_row(steps, model, way, micro_batch, peak)


def _line_rows(steps: Steps, model: str, way: Way) -> Iterator[Row]:
    slope, intercept, largest = LINES[way.name][PLACES[model]]
    ours = line_of(steps, model, way)
    explanation, without = _explain(steps, model, way, ours)
    name = f"{NAMES[model]}, {way.name}"
    for figure, published, value, undone in (
        ("for one more sample", slope, ours.slope, without.slope),
        ("besides the samples", intercept, ours.intercept, without.intercept),
    ):
        yield _row(f"{name}: {figure}", "GB", published, value, explanation, undone)
    figure = f"{name}: largest micro-batch"
    if way.head_loss == "off":
        yield _row(figure, "samples", largest, ours.largest, tolerance=0.0)
        return

    def peak_bytes(micro_batch: int) -> int:
        return int(peak_gb(steps, model, way, micro_batch) * GB)

    found = largest_on_a_line(peak_bytes, LIMIT_BYTES)
    if way.checkpointing:
        explanation = FLATTER
    yield _row(figure, "samples", largest, found, explanation, without.largest)


def _peak_row(steps: Steps, model: str, way: Way, micro_batch: int, published: float) -> Row:
    ours = peak_gb(steps, model, way, micro_batch)
    explanation, without = "", None
    if way is ALL_CHUNKED and model == "llama":
        explanation, without = TIED, _llama_as_traced(steps, way).at(micro_batch)
    figure = f"{NAMES[model]}, {way.name}: peak at micro-batch {micro_batch}"
    return _row(figure, "GB", published, ours, explanation, without)


def _explain(steps: Steps, model: str, way: Way, line: Line) -> tuple[str, Line]:
    """Return why the line differs from the trace's, and the line with that undone."""
    if way.name == "none, chunked loss":
        return SUM_IN_FLOAT32, Line(line.slope, line.intercept - _head_gb(steps, model))
    if way.head_loss == "chunked" and model == "llama":
        if way.checkpointing:
            return TIED, _llama_as_traced(steps, way)
        return SILU, Line(line.slope + _silu_gb(steps), line.intercept)
    return "", line


def _llama_as_traced(steps: Steps, way: Way) -> Line:
    """Return Llama's line with what the trace had more at micro-batches 4 and 16."""
    weights = (
        steps.record(MODELS["llama"], 4, levers=Levers(head_loss="chunked")).resident_bytes / GB
    )
    low = weights + BUCKET_GB + 3 * _head_gb(steps, "llama")
    high = peak_gb(steps, "llama", way, 16) + 16 * _silu_gb(steps)
    return _through(4, low, 16, high)


def _through(low: int, low_gb: float, high: int, high_gb: float) -> Line:
    slope = (high_gb - low_gb) / (high - low)
    return Line(slope, low_gb - slope * low)


def _head_gb(steps: Steps, model: str) -> float:
    config = steps.config(MODELS[model])
    return float(config.vocab_size * config.hidden_size * 2 / GB)


def _silu_gb(steps: Steps) -> float:
    """Return two tensors of a sample's tokens x Llama's intermediate size."""
    return float(2 * SEQUENCE_LENGTH * steps.config(MODELS["llama"]).intermediate_size * 2 / GB)
