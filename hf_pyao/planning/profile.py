"""Measures real steps, part by part, for a :class:`~hf_pyao.report.profile_report.Profile`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

from hf_pyao.planning.pack_intervals import PackIntervals
from hf_pyao.report.profile_report import Profile, ProfiledModule, ProfiledSlot, Spread
from hf_pyao.report.provenance import collect_provenance
from hf_pyao.runtime.policy import Decision
from hf_pyao.runtime.slots import Slot
from hf_pyao.transfer.transport import Transport

Part = tuple[str, str, str]
"""Phase, layer, and path in it."""


class StepProfiler(PackIntervals):
    """Notes what some micro-batches take and save.

    Times are the transport's: those of the device where there is one. A mark on a device is an
    event, and costs a few microseconds of the host.

    Args:
        transport: the engine's.
        device: where the model is.
        num_micro_batches: how many are measured.
        on_done: called once, at the end of the last one's backward.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        num_micro_batches: int,
        on_done: Callable[[Any], None],
    ) -> None:
        super().__init__(transport, device, num_micro_batches, on_done)
        self._num_micro_batches = num_micro_batches
        self._running: dict[Part, Any] = {}
        self._spans: defaultdict[Part, list[tuple[Any, Any]]] = defaultdict(list)
        self._slots: dict[str, dict[str, Slot]] = {}
        self._stays: dict[str, str | None] = {}
        self._packs: defaultdict[str, list[int]] = defaultdict(list)

    def on_module(self, layer: str, path: str, phase: str, *, is_start: bool) -> None:
        """Note the moment."""
        super().on_module(layer, path, phase, is_start=is_start)
        part, now = (phase, layer, path), self._transport.mark(self._device)
        if is_start:
            self._running[part] = now
        elif part in self._running:
            self._spans[part].append((self._running.pop(part), now))
            if not path:  # what has not ended by now has no end: it returned what it got
                for open_part in [each for each in self._running if each[:2] == (phase, layer)]:
                    del self._running[open_part]

    def on_slot(self, slot: Slot, stays: str | None, decision: Decision) -> None:
        """Note the slot."""
        self._slots.setdefault(slot.name, {})[slot.layer] = slot
        self._stays[slot.name] = stays

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
        metrics: Mapping[str, float],
    ) -> Profile:
        """Return what was measured. Waits for the device.

        Args:
            title: a heading.
            model: what tells the model.
            layer_names: qualified names of its layers.
            device_name: what it ran on.
            metrics: of the last micro-batch.
        """
        throughput = self.throughput_gib_per_s()
        speed = self._transport.bandwidth()
        num_calls = max(1, self._num_micro_batches * len(layer_names))
        paths = {path for _, _, path in self._spans} | set(self._packs)
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
            metrics=dict(metrics),
            provenance=collect_provenance(),
        )

    def _spread(self, phase: str, path: str) -> Spread | None:
        times_ms = [
            self._transport.elapsed_ms(start, end)
            for (its_phase, _, its_path), spans in self._spans.items()
            if (its_phase, its_path) == (phase, path)
            for start, end in spans
        ]
        return _spread_of(times_ms)


def _spread_of(times_ms: Iterable[float]) -> Spread | None:
    times = list(times_ms)
    if not times:
        return None
    return Spread(mean_ms=fmean(times), least_ms=min(times), most_ms=max(times))
