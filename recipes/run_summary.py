"""What a run comes to: measured and printed while it runs, and as a table when it ends."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

if TYPE_CHECKING:
    from hf_pyao import PyAOTrainer

COUNTED_ON_CPU = "counted; host stands in for the device"
"""Heading of a table from a CPU, where nothing was saved by moving it."""

_KEPT = "kept_bytes/"
_NOT_RECOMPUTED = "not_recomputed_bytes/"
_MIB = 2**20
_LABEL_WIDTH = 42
_VALUE_WIDTH = 14


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One finished run, as the table shows it."""

    title: str
    """What was trained, on what."""
    device_name: str | None
    """None for a CPU, where the host stood in for the device."""
    num_processes: int
    micro_batch: int
    """Blocks in one micro-batch of one process."""
    block_size: int
    """Tokens in a block."""
    loss_before: float | None
    """Evaluation loss before the first step; None if it was not measured."""
    loss_after: float
    """Evaluation loss after the last step."""
    step_ms: Sequence[float]
    """Times of this run's optimizer steps, the data's loading apart."""
    device_peak_bytes: int | None
    """Most device memory allocated while training; None on a CPU."""
    offload_metrics: Mapping[str, float]
    """``PyAOTrainer.offload_metrics``; empty if offloading was off."""
    head_loss_metrics: Mapping[str, float] = field(default_factory=dict)
    """``HeadLoss.metrics()`` at the end; empty if the loss was the model's own."""


class RunObserver(TrainerCallback):
    """Measure steps, the first evaluation, the peak of device memory and the head's loss."""

    def __init__(self) -> None:
        self.trainer: PyAOTrainer | None = None
        """Whose head loss is read; to be set before training."""
        self.head_loss_metrics: dict[str, float] = {}
        self.step_ms: list[float] = []
        self.loss_before: float | None = None
        self.device_peak_bytes: int | None = None
        self._step_start = 0.0
        self._is_accelerated = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note where the training runs."""
        self._is_accelerated = args.device.type != "cpu"

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the loss, if no step was taken yet."""
        if not self.step_ms and self.loss_before is None:
            self.loss_before = kwargs["metrics"].get("eval_loss")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock, on a drained device."""
        if not self.step_ms and self._is_accelerated:
            torch.accelerator.reset_peak_memory_stats()
        self._step_start = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock, on a drained device."""
        self.step_ms.append(1000 * (self._now() - self._step_start))
        if self._is_accelerated:
            self.device_peak_bytes = torch.accelerator.max_memory_allocated()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read what the head's loss did, before the trainer takes it off."""
        offloader = None if self.trainer is None else self.trainer.pyao_offloader
        if offloader is not None and offloader.head_loss is not None:
            self.head_loss_metrics = offloader.head_loss.metrics()

    def _now(self) -> float:
        if self._is_accelerated:
            torch.accelerator.synchronize()
        return time.perf_counter()


def format_summary(run: RunSummary) -> str:
    """Return the table, in plain text, without a newline at its end."""
    rows = [
        *_learning_rows(run),
        *_step_rows(run),
        *_head_loss_rows(run),
        *_offload_rows(run),
    ]
    width = _LABEL_WIDTH + 2 * _VALUE_WIDTH
    heading = COUNTED_ON_CPU if run.device_name is None else f"measured on {run.device_name}"
    return "\n".join(["", run.title, heading, "-" * width, *rows, "-" * width])


def _row(label: str, *values: str) -> str:
    return (f"{label:<{_LABEL_WIDTH}}" + "".join(f"{v:>{_VALUE_WIDTH}}" for v in values)).rstrip()


def _learning_rows(run: RunSummary) -> list[str]:
    def shown(loss: float | None) -> tuple[str, str]:
        if loss is None:
            return "not measured", "not measured"
        # Above e^700 a float ends; such a loss is a failed run, and is shown as one.
        return f"{loss:.4f}", "inf" if loss > 700 else f"{math.exp(loss):,.1f}"

    (loss_before, perplexity_before), (loss_after, perplexity_after) = (
        shown(run.loss_before),
        shown(run.loss_after),
    )
    return [
        _row("", "before", "after"),
        _row("loss, on held-out text", loss_before, loss_after),
        _row("perplexity", perplexity_before, perplexity_after),
    ]


def _step_rows(run: RunSummary) -> list[str]:
    processes = "1 process" if run.num_processes == 1 else f"each of {run.num_processes} processes"
    rows = [
        "",
        _row("micro-batch", f"{run.micro_batch} x {run.block_size} tokens, {processes}"),
    ]
    if run.step_ms:
        label = f"time of an optimizer step, median of {len(run.step_ms)}"
        rows.append(_row(label, f"{statistics.median(run.step_ms):,.0f} ms"))
    else:
        rows.append(_row("time of an optimizer step", "no step taken"))
    if run.device_peak_bytes is not None:
        rows.append(_row("device memory, peak while training", _mib(run.device_peak_bytes)))
    return rows


def _head_loss_rows(run: RunSummary) -> list[str]:
    metrics = run.head_loss_metrics
    if not metrics.get("head_loss_num_chunked"):
        return []
    num_chunks, num_tokens = (
        int(metrics[f"head_loss_{name}"]) for name in ("num_chunks", "chunk_tokens")
    )
    chunks = "1 chunk" if num_chunks == 1 else f"{num_chunks:,} chunks"
    return [_row("head loss", f"in {chunks} of {num_tokens:,} tokens")]


def _offload_rows(run: RunSummary) -> list[str]:
    totals = run.offload_metrics
    num_micro_batches = totals.get("num_micro_batches", 0)
    if not num_micro_batches:
        return ["", "activations were not offloaded"]

    def mean(key: str) -> str:
        return _mib(totals.get(key, 0) / num_micro_batches)

    rank = "" if run.num_processes == 1 else ", on the first process"
    rows = [
        "",
        f"saved by the layers for backward, per micro-batch{rank}",
        _row("  autograd would have held on the device", mean("would_hold_bytes")),
        _row("  held on the device", mean("held_bytes")),
        _row("  moved to the host", mean("offloaded_bytes")),
        _row("  moved back", mean("reloaded_bytes")),
    ]
    if totals.get("duplicate_bytes"):
        rows.append(_row("  equal to what was moved, and let go", mean("duplicate_bytes")))
    if totals.get("recomputed_bytes"):
        rows.append(_row("  dropped, and recomputed in backward", mean("recomputed_bytes")))
    for prefix, heading in (
        (_KEPT, "of these, kept on the device because"),
        (_NOT_RECOMPUTED, "to be recomputed, but kept or moved because"),
    ):
        reasons = sorted((k for k in totals if k.startswith(prefix)), key=lambda k: -totals[k])
        if reasons:
            rows += ["", heading]
            rows += [_row(f"  {key.removeprefix(prefix)}", mean(key)) for key in reasons]
    if run.device_name is not None:
        rows += ["", "compute waited for copies, per micro-batch"]
        for phase in ("forward", "backward"):
            waited_ms = totals.get(f"stall_{phase}_ms", 0) / num_micro_batches
            rows.append(_row(f"  in {phase}", f"{waited_ms:,.1f} ms"))
    return rows


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / _MIB:,.1f} MiB"
