"""What a plan comes to when it runs, beside what was predicted."""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

import torch

from hf_pyao.metrics import MicroBatchStats
from hf_pyao.report.profile_report import Profile
from hf_pyao.runtime.engine import OffloadEngine
from hf_pyao.runtime.observer import Observer

LOSES = 1.05
"""By how much slower than its fallback a plan may measure: less than that is noise."""

NUM_UNCOUNTED = 1
"""Micro-batches at the start that are not counted: the first follows the switch."""


class CheckResult(NamedTuple):
    """Medians over some micro-batches."""

    layers_ms: float
    """From the first layer's forward to the end of its backward."""
    stall_ms: float
    """Of them, waiting for copies."""


def measured_step_ms(profile: Profile) -> float | None:
    """Return the time in a profile from the first layer's forward to the end of its backward."""
    forward, backward, head = profile.layer_forward, profile.layer_backward, profile.head
    if not profile.is_measured or forward is None or backward is None or head is None:
        return None
    return len(profile.layer_names) * (forward.mean_ms + backward.mean_ms) + head.mean_ms


class PlanCheck(Observer):
    """Times some micro-batches, by two marks each.

    Args:
        engine: what follows the plan.
        device: where the model is.
        num_micro_batches: how many are timed.
    """

    margin = LOSES

    def __init__(self, engine: OffloadEngine, device: torch.device, num_micro_batches: int) -> None:
        self._engine = engine
        self._device = device
        self._transport = engine.link.transport
        self._num_left = num_micro_batches + NUM_UNCOUNTED
        self._start: Any = None
        self._end: Any = None
        self._spans: list[tuple[Any, Any, float]] = []
        self.is_done = False
        """True when enough were timed."""

    def start(self) -> None:
        """Begin, with the next layer call."""
        self._engine.observe_too(self)

    def stop(self) -> None:
        """Hear no more. Twice is fine."""
        self._engine.stop_observing(self)

    def on_module(self, layer: str, path: str, phase: str, *, is_start: bool) -> None:
        """Note the start of the first layer's forward, and every end of a backward."""
        if path or self.is_done:
            return
        if phase == "forward":
            if is_start and self._start is None:
                self._start = self._transport.mark(self._device)
        elif not is_start and self._start is not None:
            self._end = self._transport.mark(self._device)

    def on_micro_batch(self, stats: MicroBatchStats) -> None:
        """Count it."""
        start, end, self._start, self._end = self._start, self._end, None, None
        self._num_left -= 1
        if start is not None and end is not None:
            self._spans.append((start, end, stats.stall_forward_ms + stats.stall_backward_ms))
        self.is_done = self._num_left <= 0

    def result(self) -> CheckResult | None:
        """Return what was timed; None if nothing was. Waits for the device."""
        counted = self._spans[NUM_UNCOUNTED:]
        if not counted:
            return None
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return CheckResult(
            median(self._transport.elapsed_ms(start, end) for start, end, _ in counted),
            median(stall_ms for *_, stall_ms in counted),
        )
