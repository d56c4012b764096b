"""Figures that others measured: the PyAO paper's, and ALST's ladder of sequence lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hf_pyao.levers import Levers
from hf_pyao.plan.step.prediction import Prediction
from hf_pyao.plan.step.step_program import StepProgram
from studies.published_peaks import ALL, NONE, line_of, peak_gb
from studies.published_rows import MODELS, NAMES, Row, Steps, predict_plan

GB = 1e9
TOLERANCE = 0.05

# ---- the PyAO paper ------------------------------------------------------------------------------

PAPER = "PyAO paper, section 6.2 (Peak GPU Memory)"
_row = partial(Row, source=PAPER, tolerance=TOLERANCE)
FITTED = (("opt", 4, 8.7), ("gpt2", 4, 10.5))
"""The baseline's peaks, which the constant is fitted on: model, micro-batch, GB."""
CAP_GB = 8.68
"""Tensors that fit beside the constant. The paper's baseline limits all follow from any number
between 7.75 and 8.73."""
LIMITS = {"opt": (4, 10), "gpt2": (3, 10), "llama": (2, 5)}
"""Largest micro-batch of baseline and PyAO."""

LARGER_FITS = (
    "under the memory at which the paper's baseline stops, our count leaves room for more "
    "micro-batches than the paper ran: what stopped it is not in its text (it went up in even "
    "steps; host memory, and fragmentation, are candidates)"
)
HOST = (
    "the layers' tensors take 5.0 GB on the host in fp16, half of that in int8. Every pack copied "
    "anew (8.1 GB), and a fifth of the master weights and AdamW's states (3.2 GB; five nodes, "
    "ZeRO-2), still leave more than half of the paper's figure without a cause"
)


def paper(steps: Steps, models: Sequence[str] = tuple(MODELS)) -> Iterator[Row]:
    """Yield the figures that the PyAO paper's text gives, with one constant for what is no tensor.

    The constant (context, NCCL, a second bucket, workspaces) is the mean of what the two baseline
    peaks are above ours.
    """
    above = [peak - peak_gb(steps, model, NONE, size) for model, size, peak in FITTED]
    constant = sum(above) / len(above)
    for way, points in (
        (NONE, FITTED),
        (ALL, (("opt", 8, 8.0), ("gpt2", 4, 5.4))),
    ):
        for model, size, published in points:
            if model in models:
                what = "baseline" if way is NONE else "PyAO"
                yield _row(
                    f"{NAMES[model]}, {what}, peak at micro-batch {size}",
                    "GB",
                    published,
                    peak_gb(steps, model, way, size) + constant,
                )
    for model in models:
        for way, published in zip((NONE, ALL), LIMITS[model], strict=True):
            line = line_of(steps, model, way)
            found = int((CAP_GB - line.intercept) / line.slope)
            what = "baseline" if way is NONE else "PyAO"
            figure = f"{NAMES[model]}, {what}, largest micro-batch"
            yield _row(figure, "samples", published, found, LARGER_FITS)
    if "gpt2" in models:
        line = line_of(steps, "gpt2", NONE)
        share = 100 * line.slope * 3 / (line.at(3) + constant)
        yield _row(
            *("activations' share of memory, at most (GPT-2 at micro-batch 3)", "%", 59, share),
            source="PyAO paper, Figure 1",
            tolerance=2.0,
        )
    if "opt" in models:
        host = predict_plan(steps.record(MODELS["opt"], 8), offloads=True).host_peak_bytes / GB
        yield _row(
            *("OPT-1.3B, host memory at micro-batch 8", "GB", 28.66, host, HOST),
            source="PyAO paper, section 8.1 (Worst-Case CPU Memory Usage)",
        )


# ---- ALST ----------------------------------------------------------------------------------------

ALST = (
    "Arctic Long Sequence Training: Scalable And Efficient Training For Multi-Million Token "
    "Sequences, ArcticTraining's configurations run-h200-sp1-llama-8b-*"
)
ALST_MODEL = "llama:8b"
LIVE_PARAMETERS_BYTES = 2 * 10**9
"""What ZeRO-3 may have gathered at a time by default: 1e9 parameters, in half precision."""
LIGER = (
    "from this rung on ALST runs Liger's kernels throughout, not its loss alone: its SwiGLU saves "
    "gate and up, not silu of gate, and writes their gradients over them; its RMSNorm saves its "
    "input as it is, without a float32 copy"
)

LESS = (
    "less than published: tiles here follow from bytes, not from the ratio of length to width, the "
    "norms run in tiles too, and the MLP's input is saved once, so that at the peak ten tensors "
    "of tokens x 4096 are alive and nothing wider. With Liger's norms in their place it is the "
    "same. What else ALST's figure holds is not in its configurations"
)


@dataclass(frozen=True)
class Rung:
    """One of ALST's published configurations."""

    name: str
    tokens: int
    peak_gb: float
    levers: Levers
    offloads: bool
    has_liger: bool
    explanation: str = ""


_CHUNKED = Levers(head_loss="chunked")
_TILED = Levers(head_loss="chunked", mlp_tiles="auto")

RUNGS = (
    Rung("HF, checkpointing", 65_000, 137.4, Levers(), False, False),
    Rung("and a fused loss", 300_000, 135.0, _CHUNKED, False, True, LIGER),
    Rung("and layer inputs offloaded", 650_000, 126.8, _CHUNKED, True, True, LIGER),
    Rung("and a tiled MLP", 1_200_000, 136.2, _TILED, True, True, LESS),
)


def alst(steps: Steps, models: Sequence[str] = ()) -> Iterator[Row]:
    """Yield the peaks of ALST's rungs on one H200, Llama-8B at its published lengths.

    Parameters and AdamW are on the CPU: of the weights only what ZeRO-3 gathers is on the device.
    """
    for rung in RUNGS:
        plain = alst_peak_gb(*alst_step(steps, rung))
        kernels = None
        if rung.has_liger:
            kernels = alst_peak_gb(*alst_step(steps, rung, with_liger=True))
        yield _row(
            f"Llama-8B on one H200, {rung.name}, {rung.tokens:,} tokens",
            "GB",
            rung.peak_gb,
            plain,
            rung.explanation,
            source=ALST,
            tolerance=0.10,
            without=kernels,
        )


def alst_step(
    steps: Steps, rung: Rung, *, with_liger: bool = False
) -> tuple[StepProgram, Prediction]:
    """Return the step of a rung, and what is predicted of it."""
    has_own_mlp = rung.levers.mlp_tiles != "off"  # its tiles are not Liger's, but the model's
    with like_liger(has_own_mlp=has_own_mlp) if with_liger else nullcontext():
        program = steps.record(
            ALST_MODEL,
            1,
            rung.tokens,
            checkpointing=True,
            levers=rung.levers,
            variant="liger" if with_liger else "",
        )
    return program, predict_plan(program, offloads=rung.offloads)


def alst_peak_gb(program: StepProgram, prediction: Prediction) -> float:
    """Return the peak with what ZeRO-3 gathers in the place of the weights."""
    weights_bytes = program.resident_bytes
    return (prediction.peak_bytes - weights_bytes + LIVE_PARAMETERS_BYTES) / GB


def alst_tensors(steps: Steps) -> list[dict[str, Any]]:
    """Return, for each rung, what is largest at its peak, without and with Liger's kernels."""
    found = []
    for rung in RUNGS:
        for with_liger in (False, True) if rung.has_liger else (False,):
            program, prediction = alst_step(steps, rung, with_liger=with_liger)
            gathered_gb = alst_peak_gb(program, prediction)
            found.append(
                {
                    "rung": rung.name,
                    "tokens": rung.tokens,
                    "with_liger_kernels": with_liger,
                    "published_gb": rung.peak_gb,
                    "peak_gb": round(gathered_gb, 2),
                    "peak_gb_with_all_weights": round(prediction.peak_bytes / GB, 2),
                    "largest_at_peak": largest_at_peak(program, prediction),
                }
            )
    return found


def largest_at_peak(
    program: StepProgram, prediction: Prediction, most: int = 16
) -> list[dict[str, Any]]:
    """Return the largest buffers that are alive at the peak, equal ones together."""
    found: dict[tuple[str, int], int] = {}
    for buffer, start, end in prediction.lifetimes:
        if start <= prediction.peak_at < end:
            name = program.name_of(buffer)
            for layer in program.layer_names[:-1]:
                name = name.replace(f"{layer} ", "other layers' ")
            key = (name, program.buffers[buffer].nbytes)
            found[key] = found.get(key, 0) + 1
    largest = sorted(found.items(), key=lambda each: -each[1] * each[0][1])[:most]
    return [
        {"tensor": name, "count": count, "gb": round(count * nbytes / GB, 3)}
        for (name, nbytes), count in largest
    ]


class _SwiGlu(torch.autograd.Function):
    """Saves what Liger's SwiGLU saves, and writes gradients where it writes them."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return gate.mul_(grads[0]), up.mul_(grads[0])


class _RmsNorm(torch.autograd.Function):
    """Saves what Liger's RMSNorm saves, and writes the gradient where it writes it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        scale = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, scale)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        _, weight, _ = ctx.saved_tensors
        return grads[0], torch.empty_like(weight)


def like_liger(*, has_own_mlp: bool = False) -> AbstractContextManager[Any]:
    """Let Llama's norms, and its MLP unless it is to have its own, save what Liger's kernels do.

    Numbers mean nothing.
    """
    from transformers.models.llama import modeling_llama

    def mlp(self: Any, hidden: Tensor) -> Tensor:
        product = _SwiGlu.apply(self.gate_proj(hidden), self.up_proj(hidden))
        result: Tensor = self.down_proj(product)
        return result

    def norm(self: Any, hidden: Tensor) -> Tensor:
        result: Tensor = _RmsNorm.apply(hidden, self.weight)
        return result

    stack = ExitStack()
    if not has_own_mlp:
        stack.enter_context(mock.patch.object(modeling_llama.LlamaMLP, "forward", mlp))
    stack.enter_context(mock.patch.object(modeling_llama.LlamaRMSNorm, "forward", norm))
    return stack
