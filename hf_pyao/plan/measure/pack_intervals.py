"""Times a running model as the PyAO paper does: from one saved tensor to the next."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch

from hf_pyao.engine.runtime.observer import Observer
from hf_pyao.engine.runtime.parameters import FrozenShapes, is_parameter
from hf_pyao.engine.runtime.policy import Decision
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.engine.transfer.layout import reason_not_movable
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.metrics import MicroBatchStats
from hf_pyao.plan.hardware.speeds import GIB

SHORTEST_MS = 1e-3
"""Least length of an interval: what clocks of devices tell apart."""


class _Here(threading.local):
    """What was timed last on the calling thread."""

    begin: Any = None
    """Mark at the start of the interval that runs; None before the first."""
    pending: tuple[str, int] | None = None
    """Sub-module and storage of the tensor saved last, until its slot is known."""

    def __init__(self) -> None:
        self.slots: dict[int, str] = {}
        """Names of the layer's slots, by storage."""


class PackIntervals(Observer):
    """Notes when tensors are saved, for some micro-batches (PyAO paper, section 5.5).

    Args:
        transport: the engine's, whose clock is used.
        device: where the model is.
        num_micro_batches: how many are timed.
        on_done: called once, at the end of the last one's backward.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        num_micro_batches: int,
        on_done: Callable[[PackIntervals], None],
    ) -> None:
        self._transport = transport
        self._device = device
        self._num_left = num_micro_batches
        self._on_done = on_done
        self._intervals: list[tuple[str, int, Any, Any]] = []
        self._saved: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._here = _Here()

    def on_module(self, layer: str, path: str, phase: str, *, is_start: bool) -> None:
        """Begin an interval where a part of a layer starts."""
        if not path:
            self._settle_pack()
            self._here.slots = {}
        if is_start and phase == "forward":
            self._here.begin = self._transport.mark(self._device)

    def on_pack(self, layer: str, path: str, tensor: torch.Tensor) -> None:
        """End an interval, and begin the next."""
        if reason_not_movable(tensor) is not None or is_parameter(tensor, FrozenShapes()):
            return
        self.note_pack(layer, path, tensor.nbytes)
        self._settle_pack()
        self._here.pending = (path, tensor.untyped_storage()._cdata)
        now = self._transport.mark(self._device)
        begin = self._here.begin
        if begin is not None:
            self._intervals.append((path, tensor.nbytes, begin, now))
        self._here.begin = now

    def on_slot(self, slot: Slot, stays: str | None, decision: Decision) -> None:
        """Record the slot of the tensor that was just saved, if it was not saved before."""
        pending = self._here.pending
        if pending is not None and stays is None:
            path, key = pending
            self._here.pending = None
            self._here.slots[key] = slot.name
            self._saved[path][slot.name] = None

    def _settle_pack(self) -> None:
        """Record the tensor before, if it lies in a slot that was saved before."""
        pending = self._here.pending
        if pending is not None:
            path, key = pending
            self._here.pending = None
            name = self._here.slots.get(key)
            if name is not None:
                self._saved[path][name] = None

    def saved(self) -> dict[str, list[str]]:
        """Return the slots that each sub-module saves, first or again, by path."""
        return {path: list(names) for path, names in self._saved.items()}

    def forget_intervals(self) -> None:
        """Let go of what was timed so far."""
        self._intervals.clear()
        self._saved.clear()
        self._here = _Here()

    def note_pack(self, layer: str, path: str, nbytes: int) -> None:
        """Record what was saved, in addition to the time."""

    def on_micro_batch(self, stats: MicroBatchStats) -> None:
        """Count it."""
        self._num_left -= 1
        if self._num_left == 0:
            self._on_done(self)

    def throughput_gib_per_s(self) -> dict[str, float]:
        """Return the mean over the intervals of each sub-module, of all layers, in GiB/s.

        Waits for the device.
        """
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        rates: defaultdict[str, list[float]] = defaultdict(list)
        for path, nbytes, begin, end in self._intervals:
            elapsed_ms = max(self._transport.elapsed_ms(begin, end), SHORTEST_MS)
            rates[path].append(nbytes / GIB / (elapsed_ms / 1e3))
        return {path: fmean(values) for path, values in rates.items()}
