"""ZO2's three experiments: overlap, compression, scaling; on the clock, and as miniatures.

The evaluation's own figures do not add up with half precision: its block sizes are one byte a
parameter, and its copies are 18 to 19.5 GB/s with these. So rows have both: its times as they
stand, and bytes of float16 at the link's speed.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from experiments.experiment import Options
from experiments.rows import Result, Row
from experiments.visit_clock import VisitClock, VisitTimes, least_step_ms
from hf_pyao.engine.zeroth_order.perturbation import PastStep, ZerothOrderSettings, update
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.zeroth_order.estimate import GB, zeroth_order_memory

TOKENS = 2048
VOCABULARY = 50272
LINK_GB_PER_S = 25.0
"""PCIe 4.0 x16 each way."""
TFLOP_PER_S = 35.6
"""RTX 3090 in half precision without sparsity, as its data sheet has it for shaders; the published
times of a block (12 ms for OPT-1.3B) are of the same order."""


@dataclass(frozen=True)
class Way:
    """What weights are on the host, and on their way."""

    dtype: str
    transfer_dtype: str | None = None

    @property
    def name(self) -> str:
        """As the page has it."""
        on_the_way = "" if self.transfer_dtype is None else f", {self.transfer_dtype} on the way"
        return self.dtype + on_the_way

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a matrix on its way, in both directions."""
        return {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}[
            self.transfer_dtype or self.dtype
        ]


WAYS = (
    Way("float32"),
    Way("float16"),
    Way("bfloat16"),
    Way("float32", "int8"),
    Way("float16", "int8"),
)
ASSUMPTIONS = (
    "One sequence of 2,048 tokens, MeZO-SGD, all layers on the host, two slots.",
    "Both passes of a step run one after the other, and each uploads the blocks; the first one "
    "updates them and copies them back.",
    f"Compute of a block: two forwards at {TFLOP_PER_S} TFLOP/s, products and attention alone. "
    "The noise is not counted: with plain torch kernels it takes more than that.",
    f"Copies at {LINK_GB_PER_S} GB/s each way where bytes are ours; published times otherwise.",
)


@dataclass(frozen=True)
class Opt:
    """One OPT model."""

    name: str
    width: int
    layers: int
    heads: int
    published_ms: tuple[float, float] | None = None
    """Of a block: compute, and each of the two copies."""
    published_gb: float | None = None
    """ZO2's device memory."""

    @property
    def spec(self) -> str:
        """The model for ``pyao estimate``."""
        return (
            f"opt:hidden_size={self.width},word_embed_proj_dim={self.width},"
            f"ffn_dim={4 * self.width},num_hidden_layers={self.layers},"
            f"num_attention_heads={self.heads},max_position_embeddings={TOKENS},"
            f"vocab_size={VOCABULARY}"
        )

    @property
    def block_parameters(self) -> int:
        """Parameters of a layer."""
        return 12 * self.width**2 + 13 * self.width

    def compute_ms(self) -> float:
        """Return what both forwards of a layer take."""
        products = 2 * 12 * self.width**2 * TOKENS
        attention = 4 * TOKENS**2 * self.width
        return 2 * (products + attention) / (TFLOP_PER_S * 1e9)

    def copy_ms(self, itemsize: int = 2) -> float:
        """Return what one copy of a layer takes."""
        return self.block_parameters * itemsize / (LINK_GB_PER_S * 1e6)


MODELS = (
    Opt("OPT-125M", 768, 12, 12),
    Opt("OPT-1.3B", 2048, 24, 32, (12.0, 3.0), 3.75),
    Opt("OPT-6.7B", 4096, 32, 32, (35.0, 11.0), 4.99),
    Opt("OPT-13B", 5120, 40, 40, None, 6.18),
    Opt("OPT-30B", 7168, 48, 56, (85.0, 32.0), 8.86),
)


def step_ms(blocks: list[VisitTimes], num_slots: int = 2, *, is_packed: bool = False) -> float:
    """Return what the second step takes on the clock."""
    clock = VisitClock(blocks, num_slots, is_packed=is_packed)
    clock.step_ms()
    return clock.step_ms()


def serial_ms(blocks: list[VisitTimes]) -> float:
    """Return a step without any overlap: uploads, compute, copy back, one block after the other."""
    return sum(2 * each.upload_ms + each.compute_ms + each.offload_ms for each in blocks)


def overlap_rows(model: Opt, source: str, compute_ms: float, copy_ms: float) -> Iterator[Row]:
    """Yield the rows of one model; *source*: where the times are from."""
    blocks = [VisitTimes(compute_ms, copy_ms, copy_ms)] * model.layers
    step, least = step_ms(blocks), least_step_ms(blocks)
    common: dict[str, Any] = {
        "model": model.name,
        "unit": "ms",
    }
    detail = {"compute_ms": compute_ms, "copy_ms": copy_ms, "busiest_lane_ms": least}
    published = 100.0 if source == "published times" else None
    yield Row(**common, system=f"overlap, {source}", quantity="step", value=step, detail=detail)
    yield Row(
        **common, system=f"one slot, {source}", quantity="step", value=step_ms(blocks, num_slots=1)
    )
    yield Row(**common, system=f"no overlap, {source}", quantity="step", value=serial_ms(blocks))
    yield Row(
        **{**common, "unit": "%"},
        system=f"overlap, {source}",
        quantity="share of copies that is hidden",
        value=100
        * (1 - max(0.0, step - sum(b.compute_ms for b in blocks)) / (3 * copy_ms * model.layers)),
        published=published,
    )


def predict_overlap(options: Options) -> Result:
    """Predict a step with and without overlap."""
    rows: list[Row] = []
    for model in MODELS[1:2] if options.is_smoke else MODELS:
        if model.published_ms is not None:
            rows += overlap_rows(model, "published times", *model.published_ms)
        rows += overlap_rows(model, "float16, 25 GB/s", model.compute_ms(), model.copy_ms())
        if not options.is_smoke:
            rows += overlap_rows(
                model, "float16, 6.25 GB/s", model.compute_ms(), 4 * model.copy_ms()
            )
    return Result(rows=rows, assumptions=ASSUMPTIONS)


def predict_compression(options: Options) -> Result:
    """Predict step and memory by the dtype of the weights."""
    rows: list[Row] = []
    for model in MODELS[:1] if options.is_smoke else MODELS[1:3]:
        for way in WAYS:
            copy_ms = model.copy_ms(way.itemsize)
            common: dict[str, Any] = {"model": model.name, "system": way.name}
            detail = {
                "copy_ms": copy_ms,
                "compute_ms": model.compute_ms(),
                "block_parameters": model.block_parameters,
                "num_layers": model.layers,
            }
            for quantity, factor in (("step", 1), ("step at 6.25 GB/s", 4)):
                times = VisitTimes(model.compute_ms(), factor * copy_ms, factor * copy_ms)
                step = step_ms([times] * model.layers, is_packed=way.transfer_dtype is not None)
                rows.append(Row(**common, quantity=quantity, unit="ms", value=step, detail=detail))
            found = zeroth_order_memory(
                config_of(parse_model(model.spec)),
                1,
                TOKENS,
                way.dtype,
                ZerothOrderSettings(transfer_dtype=way.transfer_dtype),
            )
            for quantity, nbytes in (
                ("device memory", found.peak_bytes),
                ("host memory", found.host_bytes),
            ):
                rows.append(Row(**common, quantity=quantity, unit="GB", value=nbytes / GB))
    return Result(rows=rows, assumptions=ASSUMPTIONS)


def predict_scaling(options: Options) -> Result:
    """Predict memory and throughput over the model's size."""
    rows = []
    for model in MODELS[:1] if options.is_smoke else MODELS:
        blocks = [VisitTimes(model.compute_ms(), model.copy_ms(), model.copy_ms())] * model.layers
        found = zeroth_order_memory(config_of(parse_model(model.spec)), 1, TOKENS)
        common: dict[str, Any] = {"model": model.name, "system": "visiting layers"}
        rows += [
            Row(
                **common,
                quantity="device memory",
                unit="GB",
                value=found.peak_bytes / GB,
                published=model.published_gb,
            ),
            Row(**common, quantity="host memory", unit="GB", value=found.host_bytes / GB),
            Row(
                **common,
                quantity="throughput",
                unit="tokens/s",
                value=TOKENS / step_ms(blocks) * 1e3,
                detail={"step_ms": step_ms(blocks)},
            ),
        ]
    return Result(rows=rows, assumptions=ASSUMPTIONS)


# ---- miniatures ----------------------------------------------------------------------------------

NUM_STEPS = 150
NUM_SEEDS = 5
RATES = {"zeroth order": 3e-3, "first order (SGD)": 0.1}
RUNS = (
    *((system, Way(dtype)) for dtype in ("float32", "bfloat16")
      for system in ("zeroth order, visiting", "zeroth order, resident", "first order (SGD)")),
    *(("zeroth order, visiting", way) for way in WAYS[3:]),
)  # fmt: skip
"""What is trained: how, and in which dtypes."""


def miniature_compression(options: Options) -> Result:
    """Train a separable task on this CPU, by dtypes, resident and visiting, and by first order."""
    num_steps = 20 if options.is_smoke else NUM_STEPS
    rows: list[Row] = []
    for system, way in RUNS[:1] if options.is_smoke else RUNS:
        seeds = range(1 if options.is_smoke else NUM_SEEDS)
        found = [train(system, way, num_steps, seed) for seed in seeds]
        rows += _task_rows(f"{system}, {way.name}", found)
    rows += [_host_row(way) for way in WAYS[3:]]
    return Result(
        rows=rows,
        assumptions=(
            f"Two Gaussian clouds in 16 dimensions, a residual network of two layers, {num_steps} "
            f"steps of 64 samples, epsilon 1e-3, {NUM_SEEDS} seeds; learning rates "
            + ", ".join(f"{name}: {rate:g}" for name, rate in RATES.items())
            + ".",
        ),
    )


def _task_rows(system: str, found: list[tuple[list[float], float]]) -> Iterator[Row]:
    """Yield the rows of one kind of run; *found*: by seed, losses and accuracy."""
    common: dict[str, Any] = {"model": "separable task", "system": system}
    losses = found[0][0]
    marks = [round(k * (len(losses) - 1) / 10) for k in range(11)]
    ends = [sum(each[-20:]) / len(each[-20:]) for each, _ in found]
    yield Row(
        **common,
        quantity="loss at the end",
        unit="nats",
        value=statistics.mean(ends),
        detail={"curve": [[mark, losses[mark]] for mark in marks], "by_seed": ends},
    )
    accuracies = [100 * accuracy for _, accuracy in found]
    yield Row(**common, quantity="accuracy", unit="%", value=statistics.mean(accuracies))


def _host_row(way: Way) -> Row:
    """Return the processor's time for an element before its upload, the best of five."""
    from hf_pyao.engine.zeroth_order.int8_transfer import (
        pack,
        pack_noise,
        packed_nbytes,
        unpack_noise,
    )
    from hf_pyao.engine.zeroth_order.noise import NoiseKey

    matrix = torch.randn(2048, 2048).to(getattr(torch, way.dtype))
    noise = torch.empty(matrix.numel(), dtype=torch.uint8)
    pack_noise(torch.randn(matrix.numel()), noise)
    memory = torch.empty(packed_nbytes(matrix.size(), matrix.dtype), dtype=torch.uint8)

    def draw(key: object, step: int, first: int, end: int, device: object) -> torch.Tensor:
        return unpack_noise(noise[first:end])

    times = []
    for _ in range(5):
        begin = time.process_time()
        updated = matrix.clone()
        update(updated, NoiseKey(0, 0), PastStep(0, 1e-6, 1.0), draw=draw)
        matrix.copy_(updated)
        pack(matrix, memory)
        times.append(time.process_time() - begin)
    return Row(
        model="a matrix of 2,048 x 2,048",
        system=way.name,
        quantity="update and packing on the host",
        unit="ns of processor time an element",
        value=min(times) * 1e9 / matrix.numel(),
    )


class Task(torch.nn.Module):
    """Says which of two clouds a point is of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
        self.head = torch.nn.Linear(16, 2)

    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of *points*, (N, 16), in float32."""
        for layer in self.layers:
            points = points + torch.tanh(layer(points))
        return torch.nn.functional.cross_entropy(self.head(points).float(), labels)

    def accuracy(self, points: torch.Tensor, labels: torch.Tensor) -> float:
        """Return the share of *points* that is told right."""
        for layer in self.layers:
            points = points + torch.tanh(layer(points))
        return float((self.head(points).argmax(-1) == labels).float().mean())


def clouds(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points and labels: two clouds that a plane separates."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    points = torch.randn(count, 16, generator=generator)
    return points + 0.75 * (2 * labels[:, None] - 1), labels


def _loss(points: torch.Tensor, labels: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(points, labels)
    return loss


def train(system: str, way: Way, num_steps: int, seed: int) -> tuple[list[float], float]:
    """Return the losses of *num_steps* steps, and the accuracy on points that were not seen."""
    from hf_pyao import ZerothOrder, zeroth_order_step

    dtype = getattr(torch, way.dtype)
    torch.manual_seed(seed)
    model = Task().to(dtype)
    losses: list[float] = []
    of_seed = seed * (num_steps + 1)
    if system.startswith("zeroth"):
        made = ZerothOrder(
            model,
            ZerothOrderSettings(seed=seed, transfer_dtype=way.transfer_dtype),
            num_resident=0 if system.endswith("visiting") else None,
            layers=("layers.*",),
        )
        with made:
            for step in range(num_steps):
                points, labels = clouds(64, of_seed + step)
                model_loss = functools.partial(_loss, points.to(dtype), labels)
                loss = zeroth_order_step(
                    model, model_loss, made, learning_rate=RATES["zeroth order"]
                )
                losses.append(float(loss))
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATES["first order (SGD)"])
        for step in range(num_steps):
            points, labels = clouds(64, of_seed + step)
            loss = model(points.to(dtype), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    points, labels = clouds(4096, of_seed + num_steps)
    with torch.no_grad():
        return losses, model.accuracy(points.to(dtype), labels)
