"""Measures real steps, part by part, for a :class:`~hf_pyao.plan.documents.profile.Profile`."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeVar

import torch

from hf_pyao.engine.runtime.policy import Decision
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.engine.runtime.timeline import StepTimeline
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.metrics import MicroBatchStats
from hf_pyao.plan.documents.profile import (
    Profile,
    ProfiledModule,
    ProfiledSlot,
    ProfiledSpan,
    Spread,
)
from hf_pyao.plan.documents.provenance import collect_provenance
from hf_pyao.plan.measure.pack_intervals import PackIntervals
from hf_pyao.plan.measure.segment_memory import SegmentMemory

Part = tuple[str, str, str]
"""Phase, layer, and path in it."""

Result = TypeVar("Result")

_HEAD: Part = ("head", "", "")

MOST_SPANS = 20_000
"""Most spans of a micro-batch that a profile keeps."""

MOST_UNCOUNTED = 3
"""Micro-batches at the start that are not measured, as host memory is page-locked in them. That
takes up to half a second for each GiB, in which the device has nothing to do."""


class StepProfiler(PackIntervals):
    """Notes what some micro-batches take and save.

    Times are the transport's: those of the device where there is one. A mark on a device is an
    event, and costs a few microseconds of the host.

    Args:
        transport: the engine's.
        device: where the model is.
        num_micro_batches: how many are measured.
        on_done: called once, at the end of the last one's backward.
        pinned_bytes: returns the bytes of page-locked host memory. Micro-batches in which they grow
            are not measured, up to :data:`MOST_UNCOUNTED`.
        gradient_bytes: as :class:`SegmentMemory` takes it.
        times_packs: time from one saved tensor to the next too, as the PyAO paper does. That takes
            a mark for each tensor, and no plan is made from it.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        num_micro_batches: int,
        on_done: Callable[[Any], None],
        *,
        pinned_bytes: Callable[[], int] = lambda: 0,
        gradient_bytes: Callable[[], int] = lambda: 0,
        times_packs: bool = True,
    ) -> None:
        super().__init__(transport, device, num_micro_batches, on_done)
        self._times_packs = times_packs
        self._num_micro_batches = num_micro_batches
        self._pinned_bytes = pinned_bytes
        self._pinned_before_bytes = pinned_bytes()
        self._memory = SegmentMemory(device, gradient_bytes)
        """Of the first micro-batch, whether it is counted or not."""
        self.num_uncounted = 0
        """Micro-batches that ran and are not measured."""
        self._running: dict[Part, Any] = {}
        self._spans: defaultdict[Part, list[tuple[Any, Any]]] = defaultdict(list)
        self._slots: dict[str, dict[str, Slot]] = {}
        self._stays: dict[str, str | None] = {}
        self._packs: defaultdict[str, list[int]] = defaultdict(list)
        self._stats: list[MicroBatchStats] = []
        self._host_began_s = 0.0
        self._least_host_s = math.inf
        """Least time of the host over the first layer's forward: later it may wait for the device,
        which cannot have more than so many kernels queued."""
        self._first_layer = ""
        self._timeline = StepTimeline(transport, device) if num_micro_batches == 1 else None
        """Of the last micro-batch, from its start."""

    def begin_forward(self) -> None:
        """Note that the model's forward begins."""
        self._memory.at_start()

    def on_module(self, layer: str, path: str, phase: str, *, is_start: bool) -> None:
        """Note the moment."""
        if self._times_packs:
            super().on_module(layer, path, phase, is_start=is_start)
        if self._timeline is not None:
            self._timeline.on_module(layer, path, phase, is_start=is_start)
        part, now = (phase, layer, path), self._transport.mark(self._device)
        if not path:
            self._memory.at_border(phase, is_start=is_start)
            self._note_head(phase, now, is_start=is_start)
            self._note_host(layer, phase, is_start=is_start)
        if is_start:
            self._running[part] = now
        elif part in self._running:
            self._spans[part].append((self._running.pop(part), now))
            if not path:  # what has not ended by now has no end: it returned what it got
                for open_part in [each for each in self._running if each[:2] == (phase, layer)]:
                    del self._running[open_part]

    def _note_head(self, phase: str, now: Any, *, is_start: bool) -> None:
        """See where the last layer's forward ends, and where the first backward starts."""
        if phase == "forward":
            self._running.pop(_HEAD, None)
            if not is_start:
                self._running[_HEAD] = now
        elif is_start and _HEAD in self._running:
            self._spans[_HEAD].append((self._running.pop(_HEAD), now))

    def _note_host(self, layer: str, phase: str, *, is_start: bool) -> None:
        now_s = time.perf_counter()
        self._first_layer = self._first_layer or layer
        if is_start:
            self._host_began_s = now_s
        elif phase == "forward" and layer == self._first_layer:
            self._least_host_s = min(self._least_host_s, now_s - self._host_began_s)

    def on_copy(self, direction: str, label: object, nbytes: int, ticket: Any) -> None:
        """Note the copy, in the last micro-batch."""
        if self._timeline is not None:
            self._timeline.on_copy(direction, label, nbytes, ticket)

    def around(self, what: str, label: object, work: Callable[[], Result]) -> Result:
        """Note a part of the overhead, in the last micro-batch."""
        return work() if self._timeline is None else self._timeline.around(what, label, work)

    def on_micro_batch(self, stats: MicroBatchStats) -> None:
        """Count it, or forget it if host memory was page-locked in it."""
        self._memory.end()
        pinned_bytes = self._pinned_bytes()
        has_pinned = pinned_bytes > self._pinned_before_bytes
        self._pinned_before_bytes = pinned_bytes
        if has_pinned and not self._stats and self.num_uncounted < MOST_UNCOUNTED:
            self.num_uncounted += 1
            self._forget()
            return
        self._stats.append(stats)
        if len(self._stats) == self._num_micro_batches - 1:
            self._timeline = StepTimeline(self._transport, self._device)
        super().on_micro_batch(stats)

    def _forget(self) -> None:
        """Begin anew, with the next micro-batch."""
        for noted in (self._running, self._spans, self._slots, self._stays, self._packs):
            noted.clear()
        self.forget_intervals()
        if self._timeline is not None:
            self._timeline = StepTimeline(self._transport, self._device)

    @property
    def has_copied(self) -> bool:
        """True if anything left the device."""
        return any(stats.offloaded_bytes for stats in self._stats)

    def on_slot(self, slot: Slot, stays: str | None, decision: Decision) -> None:
        """Note the slot."""
        if self._times_packs:
            super().on_slot(slot, stays, decision)
        self._slots.setdefault(slot.name, {})[slot.layer] = slot
        self._stays[slot.name] = stays

    def on_pack(self, layer: str, path: str, tensor: torch.Tensor) -> None:
        """Time it, if that is wanted."""
        if self._times_packs:
            super().on_pack(layer, path, tensor)

    def note_pack(self, layer: str, path: str, nbytes: int) -> None:
        """Count what a part of a layer saves."""
        self._packs[path].append(nbytes)

    def profile(
        self,
        *,
        title: str,
        model: Mapping[str, Any],
        layer_names: Sequence[str],
        device_name: str,
        host: Mapping[str, float] | None = None,
        **more: Any,
    ) -> Profile:
        """Return what was measured. Waits for the device.

        Args:
            title: a heading.
            model: what tells the model.
            layer_names: qualified names of its layers.
            device_name: what it ran on.
            host: what is known of the host's memory.
            more: further fields of the profile.
        """
        throughput = self.throughput_gib_per_s()
        speed = self._transport.bandwidth()
        num_calls = max(1, self._num_micro_batches * len(layer_names))
        paths = {path for part in self._spans if part != _HEAD for path in part[2:]}
        paths |= set(self._packs)
        modules = [
            ProfiledModule(
                path=path,
                forward=self._spread("forward", path),
                backward=self._spread("backward", path),
                saved_bytes=sum(
                    max(slot.nbytes for slot in slots.values())
                    for name, slots in self._slots.items()
                    if name.rpartition(":")[0] == path and self._stays[name] is None
                ),
                num_packs=len(self._packs[path]) / num_calls,
                packed_bytes=sum(self._packs[path]) // num_calls,
                throughput_gib_per_s=throughput.get(path),
            )
            for path in paths
            if path or "" in self._packs
        ]
        modules.sort(key=lambda each: (-(each.forward.mean_ms if each.forward else 0), each.path))
        return Profile(
            title=title,
            model=dict(model),
            device=device_name,
            num_micro_batches=self._num_micro_batches,
            layer_names=list(layer_names),
            layer_forward=self._spread("forward", ""),
            layer_backward=self._spread("backward", ""),
            modules=modules,
            slots=[
                ProfiledSlot(
                    name=name,
                    nbytes=max(slot.nbytes for slot in slots.values()),
                    dtype=str(next(iter(slots.values())).dtype).removeprefix("torch."),
                    num_layers=len(slots),
                    stays=self._stays[name],
                )
                for name, slots in self._slots.items()
            ],
            link={
                "d2h_gib_per_s": speed.d2h_gib_per_s,
                "h2d_gib_per_s": speed.h2d_gib_per_s,
            },
            head=_spread_of(self._times_ms("head", "")),
            host={
                **(host or {}),
                **self._host_of_layer(),
                "peak_bytes": float(max((s.host_peak_bytes for s in self._stats), default=0)),
            },
            metrics=_means([stats.as_dict() for stats in self._stats]),
            grown_bytes=dict(self._memory.grown_bytes),
            peak_allocated_bytes=max((s.device_peak_bytes for s in self._stats), default=0) or None,
            timeline=self._spans_of_timeline(),
            provenance=collect_provenance(),
            **more,
        )

    def _host_of_layer(self) -> dict[str, float]:
        """Return what the first layer's forward takes the host, where that is not the device."""
        if self._device.type == "cpu" or math.isinf(self._least_host_s):
            return {}
        return {"layer_forward_ms": 1e3 * self._least_host_s}

    def within_ms(self, spans: Sequence[tuple[Any, float]]) -> dict[str, float]:
        """Return how much of *spans* was in layers, in ms of a micro-batch. Waits for the device.

        Args:
            spans: a mark of the transport where each began, and what it took, in ms.

        Returns:
            By ``"forward"``, ``"backward"`` and ``"head"``, which is between the two.
        """
        found: defaultdict[str, float] = defaultdict(float)
        parts = [
            (self._transport.elapsed_ms(spans[0][0], start), phase, end)
            for (phase, _, path), own in self._spans.items()
            if not path and spans
            for start, end in own
        ]
        parts.sort(key=lambda part: part[0])
        starts_ms = [start_ms for start_ms, *_ in parts]
        for before, taken_ms in spans:
            at = bisect_right(starts_ms, self._transport.elapsed_ms(spans[0][0], before)) - 1
            if at >= 0 and self._transport.elapsed_ms(before, parts[at][2]) > 0:
                found[parts[at][1]] += taken_ms
        return {phase: total_ms / self._num_micro_batches for phase, total_ms in found.items()}

    def _spans_of_timeline(self) -> list[ProfiledSpan]:
        if self._timeline is None:
            return []
        return [ProfiledSpan(**span._asdict()) for span in self._timeline.spans()[:MOST_SPANS]]

    def _spread(self, phase: str, path: str) -> Spread | None:
        return _spread_of(self._times_ms(phase, path))

    def _times_ms(self, phase: str, path: str) -> list[float]:
        return [
            self._transport.elapsed_ms(start, end)
            for (its_phase, _, its_path), spans in self._spans.items()
            if (its_phase, its_path) == (phase, path)
            for start, end in spans
        ]


def _means(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for each in metrics for key in each)
    return {key: fmean(each.get(key, 0.0) for each in metrics) for key in keys}


def _spread_of(times_ms: Iterable[float]) -> Spread | None:
    times = list(times_ms)
    if not times:
        return None
    return Spread(mean_ms=fmean(times), least_ms=min(times), most_ms=max(times))
